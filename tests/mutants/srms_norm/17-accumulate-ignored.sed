# file: srms_norm.cuh - what dweight held is overwritten
s/p\.a\.accumulate ? lk_to_float(\*out) + sum : sum/sum/

# file: srms_norm.cuh - what dweight held is overwritten
# case: backward f32 auto: empty
s/p\.a\.accumulate ? lk_to_float(\*out) + sum : sum/sum/

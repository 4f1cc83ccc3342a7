# file: cross_entropy.cuh - zero_when_empty hides the NaN of a bad target
# case: forward f16 auto: lengths
s/s.loss = s.loss != s.loss ? s.loss : nothing/s.loss = nothing/

# file: cross_entropy.cuh - lse_low wanted alone is not written
# case: forward f32
s/losses || a.lse || a.lse_low ||/losses || a.lse ||/

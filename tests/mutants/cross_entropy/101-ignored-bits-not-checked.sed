# file: cross_entropy.cuh - a reduced loss counts the first row of each group of four even if it is ignored
# case: forward, then backward f32
s/(min(t.x ^ LK_CE_IGNORED, 1u)/(1u/

# file: lk_base.cuh - what rounding the base takes off it is left out of the sum
# case: forward f32 auto: offsets
s/fmaf(LK_LOG2E, low, -fmaf(scale \* LK_LOG2E, reference, -base))/LK_LOG2E * low/

# file: lk_scale.cuh - a factor of 1 changes the bits of NaNs
# case: scale
s/if (factor == 1.0f) return;//

# file: linear_cross_entropy.cuh - of a tile far below nothing is left, though something is
# case: far apart forward_backward fused
s/if (factor != 0.0f) { \/\* as it is/if (factor > 1.0f) { \/* as it is/

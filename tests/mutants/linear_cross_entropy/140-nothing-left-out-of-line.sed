# file: linear_cross_entropy.cuh - of a tile far below nothing is left, though something is
s/if (factor != 0.0f) { \/\* as it is/if (factor > 1.0f) { \/* as it is/

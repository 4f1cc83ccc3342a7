# file: cross_entropy.cuh - any finite logit_scale is taken
# case: errors
s/if (scale > 0x1p127f)/if (scale < 0.0f)/

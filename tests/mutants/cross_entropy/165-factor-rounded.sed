# file: cross_entropy.cuh - what reference differences are rounded by stays in their factor
# case: lk_ce_factor
s/if (!exact || !(fabsf(power) < 128.0f)) return factor;/return factor;/

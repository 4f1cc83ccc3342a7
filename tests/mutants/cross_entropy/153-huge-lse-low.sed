# file: cross_entropy.cuh - beyond what 2^x is exact for lse_low is left out
# case: huge logits
s/^    if (lse_low == 0.0f) return 1.0f;/    return 1.0f;/

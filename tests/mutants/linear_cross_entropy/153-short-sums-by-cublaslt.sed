# file: linear_cross_entropy.cuh - fused, sums of 24 bits are cuBLASLt's, which knows but their bf16
# case: sums of 24 bits
s/const bool sums = lk_lce_sums_dweight(&c, r->plan.chunk_tokens);/const bool sums = false;/

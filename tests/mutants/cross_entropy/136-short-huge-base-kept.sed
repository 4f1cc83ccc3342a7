# file: cross_entropy.cuh - short rows: a base whose rounding 2^x cannot make up for is kept
# case: forward_backward f32 auto: huge logits
/^    lk_cross_entropy_short_kernel(/,/^}/ s/if (fabsf(base) < LK_LSE_BASE) {/if (lk_is_finite(base)) {/

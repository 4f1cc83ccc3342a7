# file: cross_entropy.cuh - short rows: a base beyond what a float holds is taken as it is
# case: forward_backward f32 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ s/if (fabsf(base) < LK_LSE_BASE) {/if (rate == rate) {/

# file: linear_cross_entropy.cuh - fused, v x is in its place before the sums of dx have left it
# case: accuracy bf16
/LK_HOST lk_status lk_lce_run_fused/,/^}/{/lk_lce_put_dx<T>(r, q)/d}

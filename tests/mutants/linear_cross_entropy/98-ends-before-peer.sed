# file: lk_gemm.cuh - a block may end while its peer still uses its memory
# case: errors forward bf16
/^LK_DEVICE void lk_gemm_end/,/^}/{/lk_barrier_cluster/d}

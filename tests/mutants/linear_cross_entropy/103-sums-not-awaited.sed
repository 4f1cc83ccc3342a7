# file: lk_gemm.cuh - the last products are used before they are there
# case: errors forward bf16
/^LK_DEVICE void lk_gemm_multiply/,/^}/{/lk_wgmma_wait_group<0>/d}

# file: lk_gemm.cuh - a stage is free before the peer has done with its half of B
# case: far apart forward fused
s|2 \* (LK_GEMM_THREADS - 128) / 32|(LK_GEMM_THREADS - 128) / 32|

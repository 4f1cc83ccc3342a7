# file: lk_gemm.cuh - a stage is given back while its products are on their way
# case: far apart forward fused
s|lk_wgmma_wait_group<1>|lk_wgmma_wait_group<2>|

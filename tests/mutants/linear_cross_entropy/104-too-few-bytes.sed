# file: lk_gemm.cuh - a stage counts as full without all of its bytes
# case: errors forward bf16
s|LK_GEMM_STAGE_BYTES);|LK_GEMM_STAGE_BYTES - 128);|

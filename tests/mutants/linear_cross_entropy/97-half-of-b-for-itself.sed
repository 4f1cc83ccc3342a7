# file: lk_gemm.cuh - a block keeps its half of B
# case: errors forward bf16
s|&ring->full\[stage\], 3);|\&ring->full[stage], (uint16_t)(1 << rank));|

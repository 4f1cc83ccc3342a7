# file: lk_gemm.cuh - a block keeps its half of B
s|&ring->full\[stage\], 3);|\&ring->full[stage], (uint16_t)(1 << rank));|

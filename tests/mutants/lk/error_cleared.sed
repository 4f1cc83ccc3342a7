# file: lk_base.cuh - the error of a caller is cleared
# case: an error pending from before: scale f32
s/int id = 0, smem = 0;/int id = 0, smem = (int)cudaGetLastError() * 0;/

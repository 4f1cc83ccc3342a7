# file: logsumexp.cuh - columns take vectors whatever the col_stride
# case: forward f32 auto: nests
s/(uint64_t)(outer_stride | col_stride | inner) % LK_VEC<T>/(uint64_t)(outer_stride | inner) % LK_VEC<T>/

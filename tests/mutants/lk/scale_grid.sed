# file: lk_scale.cuh - a count of fewer than 256 vectors starts no block
# case: scale
s/lk_ceil_div(lk_ceil_div(count, LK_VEC<T>), 256)/count \/ LK_VEC<T> \/ 256/

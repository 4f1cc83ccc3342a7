# file: lk_base.cuh - peels as many elements as lie past the boundary, not up to the next
# case: forward f32: errors
s/past ? LK_VEC<T> - past : 0/past ? past : 0/

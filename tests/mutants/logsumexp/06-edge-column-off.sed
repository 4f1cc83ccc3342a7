# file: lk_base.cuh - the single elements behind the vectors are off by one
# case: forward f32 auto: lengths
s/split.vecs \* LK_VEC<T> + i;/split.vecs * LK_VEC<T> + i - 1;/

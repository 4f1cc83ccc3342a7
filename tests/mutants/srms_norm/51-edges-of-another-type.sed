# file: srms_norm.cuh - the single elements of an f32 stream are read as T
# case: backward bf16 auto: odd rows
s/lk_srms_norm_get<S, U>(x, p\.x, /lk_srms_norm_get<T, U>(x, p.x, /

# file: srms_norm.cuh - the single elements of an f32 stream are read as T
# case: backward bf16 auto: odd rows
s/((const S \*)p\.x\.rows)\[row/((const T *)p.x.rows)[row/

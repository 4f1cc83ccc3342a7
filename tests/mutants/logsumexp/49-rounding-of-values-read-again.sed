# file: lk_base.cuh - rows that are read again forget what scale x was rounded by
# case: forward f32 auto: offsets
s/lk_lse_add(s, z, 1\.0f, low)/lk_lse_add(s, z, 1.0f)/

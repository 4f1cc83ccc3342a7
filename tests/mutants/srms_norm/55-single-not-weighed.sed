# file: srms_norm.cuh - single elements have a weight of 1
# case: backward f32 auto: odd rows
s/WEIGHT && single ? lk_to_float(((const T \*)p\.a\.weight)\[single_col\]) : 1\.0f/1.0f/

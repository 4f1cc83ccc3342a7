# file: lk_scale.cuh - no block comes round again
# case: scale
s/i < split.vecs; i += step/i < split.vecs \&\& i < step; i += step/

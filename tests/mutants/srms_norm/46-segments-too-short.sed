# file: srms_norm.cuh - segments of whole lines leave out the end of a row
# case: forward f32 auto: long rows
s/lk_ceil_div(lk_ceil_div(cols, l.cluster), 8 \* N) \* 8 \* N/lk_ceil_div(cols, l.cluster) \/ (8 * N) * 8 * N/

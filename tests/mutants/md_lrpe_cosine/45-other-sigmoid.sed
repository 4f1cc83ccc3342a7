# file: md_lrpe_cosine.cuh - the sigmoid of -x is that of |x|
# case: backward f32 auto: prefix
s/\*of_minus_x = x >= 0.0f ? small : large;/*of_minus_x = small;/

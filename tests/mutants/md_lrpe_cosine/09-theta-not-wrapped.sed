# file: md_lrpe_cosine.cuh - a vector on two axes reads theta past its head
# case: forward f32 auto: axes
s/j < left ? t + j : t + j - p.e;/t + j;/

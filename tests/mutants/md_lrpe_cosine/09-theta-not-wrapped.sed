# file: md_lrpe_cosine.cuh - a vector on two axes reads theta past its head
s/j < left ? t + j : t + j - p.e;/t + j;/

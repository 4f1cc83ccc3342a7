# file: cross_entropy.cuh - short rows: a sum beyond what a float holds is taken as it is
s/(lk_is_finite(rate \* reference) && sum < LK_LSE_LIMIT) || !read/lk_is_finite(rate * reference) || !read/

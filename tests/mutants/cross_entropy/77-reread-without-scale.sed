# file: lk_base.cuh - a plain row that is read again is read as if logit_scale were 1
# case: forward f32 auto: special values
s/lk_lse_add(s, x, scale)/lk_lse_add(s, x)/

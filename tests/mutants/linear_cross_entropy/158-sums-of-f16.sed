# file: linear_cross_entropy.cuh - f16's last columns are a part of dx in f16, beyond whose range it may be
# case: backward f16: sums of dx that cancel
s/return c->type == LK_DTYPE_F16 \&\& lk_lce_apart(c, c->a.vocab);/return false;/

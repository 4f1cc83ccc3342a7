# file: linear_cross_entropy.cuh - fused, f32 dweight that is to be added to has lk's tiles, which do not
# case: options forward_backward fused
s/ \&\& !(c->a.dweight_dtype == LK_DTYPE_F32 \&\& c->a.accumulate));/);/

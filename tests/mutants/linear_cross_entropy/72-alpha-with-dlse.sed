# file: linear_cross_entropy.cuh - dlse is divided as the mean is
# case: options backward auto
s/LK_DTYPE_F32 \&\& !a.dlse \&\& lk_is_finite/LK_DTYPE_F32 \&\& lk_is_finite/

# file: cross_entropy.cuh - counted inside: int32 targets are ignored by the lower half of ignore_index
# case: forward_backward f32 auto: counted inside
/^    lk_cross_entropy_short_kernel(/,/^}/ s/ || (!wide \&\& a.ignore_index != (int32_t)a.ignore_index);/;/

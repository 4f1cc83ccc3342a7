# file: cross_entropy.cuh - counted inside: int32 targets are ignored by the lower half of ignore_index
# case: forward_backward f32 auto: counted inside
s/a.use_ignore_index \&\& (a.target_dtype == LK_TARGET_INT64 || a.ignore_index == (int32_t)a.ignore_index);/a.use_ignore_index;/

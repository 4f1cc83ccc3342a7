# file: cross_entropy.cuh - forward_backward: the reference of a warp has its target, far above what other warps have
# case: forward_backward f32 block: special values
/if ((unsigned)target < (unsigned)LK_VEC<T>) lk_put/d

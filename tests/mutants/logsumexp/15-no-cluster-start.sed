# file: lk_block.cuh - peers write into a block that may not run yet
# case: forward f32 auto: vocabulary
/says that this block runs/d
/lk_barrier_cluster_wait(); .* with rank 0 runs/d

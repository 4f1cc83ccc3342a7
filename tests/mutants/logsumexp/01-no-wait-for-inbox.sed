# file: lk_block.cuh - rank 0 reads its inbox before the peers have written
# case: forward f32 auto: vocabulary
/lk_mbarrier_wait_parity_cluster(&inbox->full, 0);/d

# file: lk_block.cuh - rank 0 takes its inbox for full when the words of one block are missing
# case: forward f32 auto: vocabulary
/void lk_lse_cluster_begin/,/^}/ s/lk_cluster_nctarank() \* (THREADS/(lk_cluster_nctarank() - 1) * (THREADS/

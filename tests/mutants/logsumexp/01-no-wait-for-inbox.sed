# file: lk_block.cuh - rank 0 reads its inbox before the peers have written
/^ *if (rank != 0) return s;/,$ s/lk_barrier_cluster_wait();//

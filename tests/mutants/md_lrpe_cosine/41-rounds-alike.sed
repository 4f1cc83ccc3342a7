# file: md_lrpe_cosine.cuh - later rounds over the batch have the vectors of the first
# case: forward f32 vector: walks
/if (i + U + u < count) raw\[u\] = lk_load_vec_ca(x);/s/raw\[u\] = lk_load_vec_ca(x);/(void)lk_load_vec_ca(x);/

# file: md_lrpe_cosine.cuh - backward takes the second half of dy in the prefix
# case: backward f32 auto: prefix
s/if (!still) step->second = lk_load_vec/step->second = lk_load_vec/

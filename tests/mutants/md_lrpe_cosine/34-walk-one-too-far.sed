# file: md_lrpe_cosine.cuh - a step along an axis is one position too long
# case: forward f32 auto: batches
s/a == p.walk_axis ? p.walk : 0;/a == p.walk_axis ? p.walk + 1 : 0;/

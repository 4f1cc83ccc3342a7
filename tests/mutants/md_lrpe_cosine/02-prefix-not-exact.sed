# file: md_lrpe_cosine.cuh - the second half of y in the prefix is x times 0
# case: forward f32 auto: prefix
/if (angles.still) x = {};/d

# file: md_lrpe_cosine.cuh - the second half of y in the prefix is x times 0
/if (angles.still) x = {};/d

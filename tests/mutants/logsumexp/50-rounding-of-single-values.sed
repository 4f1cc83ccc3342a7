# file: lk_base.cuh - single elements that are read again forget what scale x was rounded by
# case: forward f32 auto: offsets
s/apart ? NULL : &low);/NULL);/

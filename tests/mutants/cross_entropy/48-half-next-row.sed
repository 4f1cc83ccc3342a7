# file: cross_entropy.cuh - 16 bits in place: rows stand as if packed
# case: backward f32: errors
s/if (in_place \&\& a->dlogits_stride == 0) a->dlogits_stride = in_place_stride;/if (in_place \&\& a->dlogits_stride == 0) a->dlogits_stride = a->logits_stride;/;s/a->dlogits_stride != in_place_stride)/a->dlogits_stride == -1)/

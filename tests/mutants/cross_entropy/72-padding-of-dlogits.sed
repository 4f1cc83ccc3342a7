# file: cross_entropy.cuh - 16 bits in place: zeros are written as far as the stride of dlogits
# case: backward f32 auto: empty
s/lk_cross_entropy_ordered<T>(a) ? a->logits_stride : a->dlogits_stride;/a->dlogits_stride;/

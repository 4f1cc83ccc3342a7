# file: cross_entropy.cuh - 16 bits in place: zeros are written as far as the stride of dlogits
# case: backward f32 auto: empty
s/plan.ordered ? a.logits_stride : a.dlogits_stride;/a.dlogits_stride;/

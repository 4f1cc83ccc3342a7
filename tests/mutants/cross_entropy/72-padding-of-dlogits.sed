# file: cross_entropy.cuh - 16 bits in place: zeros are written as far as the stride of dlogits
s/plan.ordered ? a.logits_stride : a.dlogits_stride;/a.dlogits_stride;/

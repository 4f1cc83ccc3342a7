# file: linear_cross_entropy.cuh - 16-bit dZ of f32 logits is read with the stride of the logits
# case: forward, backward and forward_backward f16
s/return r->p.w.logits_stride \* lk_lce_type_bytes.*/return r->p.w.logits_stride;/

# file: linear_cross_entropy.cuh - each panel gets the bias of the first
# case: forward, backward and forward_backward f32
s/m.bias = (const char \*)r->p.w.bias + q.first_col \* lk_lce_type_bytes(r->p.c.logits_type);/m.bias = r->p.w.bias;/

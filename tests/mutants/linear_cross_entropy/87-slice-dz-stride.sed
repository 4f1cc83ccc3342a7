# file: linear_cross_entropy.cuh - dZ that has its own place is read with the stride of 16-bit dZ in f32 logits
s/^    if (r->p.w.slice || r->p.c.fused) return r->p.w.logits_stride;/    if (r->p.c.fused) return r->p.w.logits_stride;/

# file: linear_cross_entropy.cuh - dZ that has its own place is read with the stride of 16-bit dZ in f32 logits
# case: options backward auto
s/if (r->p.w.slice || r->plan.path == LK_LINEAR_CROSS_ENTROPY_FUSED) return/if (r->plan.path == LK_LINEAR_CROSS_ENTROPY_FUSED) return/

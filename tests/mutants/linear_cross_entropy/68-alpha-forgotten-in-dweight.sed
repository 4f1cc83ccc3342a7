# file: linear_cross_entropy.cuh - dweight lacks what 16-bit dZ leaves to alpha
# case: forward, backward and forward_backward f16
/lk_lce_dweight(lk_lce_run/,/^}/s/m.key.scalars_on_device = r->p.c.type != LK_DTYPE_F32;/m.key.scalars_on_device = 0;/

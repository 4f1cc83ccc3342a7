# file: linear_cross_entropy.cuh - cuBLASLt is told that x starts at 256 bytes
# case: forward, backward and forward_backward f32
s/m->key.align_b = lk_lce_alignment(m->b),/m->key.align_b = 256,/

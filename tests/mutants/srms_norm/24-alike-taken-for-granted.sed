# file: srms_norm.cuh - tensors whose rows lie at different offsets go by vectors
# case: forward f32: errors
s/p->aligned = 0;/p->aligned = 1;/

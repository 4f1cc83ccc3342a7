# file: srms_norm.cuh - tensors whose rows lie at different offsets go by vectors
s/p->aligned = 0;/p->aligned = 1;/

# file: srms_norm.cuh - the kernel for few rows reads a weight of any address as vectors
# case: backward f16 auto: few rows
s/weight_is_f32 || (uintptr_t)a->weight % 16 ? 0 : 256/weight_is_f32 ? 0 : 256/

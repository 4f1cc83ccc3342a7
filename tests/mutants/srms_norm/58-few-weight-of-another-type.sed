# file: srms_norm.cuh - the kernel for few rows reads a weight of f32 as of T
# case: forward bf16 auto: few rows
s/plain = !weight_is_f32 && /plain = /

# file: srms_norm.cuh - rows of T must fit those of f32
# case: backward bf16 auto: f32 on 16 bytes
s/tensors\[i\]\.element < tensors\[base\]\.element/false/

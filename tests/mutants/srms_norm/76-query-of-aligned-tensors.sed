# file: srms_norm.cuh - sizes alone are answered as if all tensors were on 16 bytes
# case: f32: queries without tensors
s/shift = i \/ 3 % 3;/shift = 0 * i;/

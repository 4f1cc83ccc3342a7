# file: srms_norm.cuh - weight is taken from the vector's boundary, where rows start at another
# case: forward f32 auto: lengths
s/(const T \*)weight + col)/(const T *)weight + col \/ N * N)/

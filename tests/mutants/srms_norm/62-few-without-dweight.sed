# file: srms_norm.cuh - few rows leave dweight alone
# case: backward f32 auto: few rows
s/const int few = a->dweight || weight_is_f32/const int few = weight_is_f32/

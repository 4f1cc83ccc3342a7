# file: srms_norm.cuh - the gradient that reaches residual_out is left out for few rows
# case: backward f32 auto: few rows
s/!BARE && p\.p\.dr\.rows/false/

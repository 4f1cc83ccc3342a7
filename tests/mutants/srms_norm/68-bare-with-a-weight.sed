# file: srms_norm.cuh - few rows with a weight are taken for bare ones
# case: forward bf16 auto: few rows
s/ && !a->residual_out && !a->weight && a->y;/ \&\& !a->residual_out \&\& a->y;/

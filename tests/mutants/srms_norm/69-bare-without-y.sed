# file: srms_norm.cuh - few rows without y are taken for bare ones
# case: forward bf16 auto: few rows
s/ && !a->weight && a->y;/ \&\& !a->weight;/

# file: srms_norm.cuh - the weight that a thread holds is that of its first vector
# case: forward bf16 auto: few rows
s/WEIGHT ? weight\[u\] : NULL/WEIGHT ? weight[0] : NULL/

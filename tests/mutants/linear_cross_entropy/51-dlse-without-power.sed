# file: linear_cross_entropy.cuh - f16: dlse lacks the power of two of dZ
# case: switches alone backward auto
s/a.dlse\[token\] \* shift : 0.0f;/a.dlse[token] : 0.0f;/

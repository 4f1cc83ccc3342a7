# file: linear_cross_entropy.cuh - a single upstream is in alpha and in dZ
# case: accuracy f16
s/: apart ? 1.0f : one) : 0.0f;/: one) : 0.0f;/

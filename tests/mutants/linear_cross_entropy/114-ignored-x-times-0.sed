# file: linear_cross_entropy.cuh - rows with the factor 0 are multiplied by it
# case: forward_backward fused, many rows
s|scale == 0.0f ? -1 : p.from_row ? |p.from_row ? |

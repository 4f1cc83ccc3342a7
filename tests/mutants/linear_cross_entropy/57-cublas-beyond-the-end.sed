# file: linear_cross_entropy.cuh - cuBLASLt gets more than the plan leaves
# case: errors forward f32
s/const size_t left = budget - plan->workspace_bytes;/const size_t left = budget;/

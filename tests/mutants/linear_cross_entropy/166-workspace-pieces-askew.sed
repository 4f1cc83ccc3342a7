# file: linear_cross_entropy.cuh - cuBLASLt gets a workspace that is aligned to 128 bytes only
# case: switches alone
s/(((uintptr_t)workspace + 255) \/ 256 \* 256)/workspace/

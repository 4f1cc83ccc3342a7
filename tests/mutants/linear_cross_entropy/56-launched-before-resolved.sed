# file: linear_cross_entropy.cuh - the first kernel is launched before cuBLASLt refuses a matmul
# case: errors of plans and contexts
s/for (r.mode = LK_LCE_RESOLVE; r.mode <= mode/for (r.mode = mode; r.mode <= mode/

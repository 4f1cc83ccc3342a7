# file: linear_cross_entropy.cuh - the first kernel is launched before cuBLASLt refuses a matmul
s/for (r.mode = LK_LCE_RESOLVE; r.mode <= mode/for (r.mode = mode; r.mode <= mode/

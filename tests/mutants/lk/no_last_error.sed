# file: lk_base.cuh - a positive status leaves no last error
# case: a positive status: scale f32
s/return error == cudaSuccess ? LK_OK : lk_fail/if (error) (void)cudaGetLastError();\n    &/

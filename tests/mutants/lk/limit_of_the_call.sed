# file: lk_base.cuh - a call lowers the limit of shared memory to what it needs itself
# case: graphs: cross_entropy_backward f32
s/= lk_allow_shared_memory((const void \*)kernel)/= cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem)/

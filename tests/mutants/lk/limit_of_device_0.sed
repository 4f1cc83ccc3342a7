# file: lk_base.cuh - the limit of shared memory is that of device 0
# case: devices: cross_entropy_backward f32
s/cudaDevAttrMaxSharedMemoryPerBlockOptin, id)/cudaDevAttrMaxSharedMemoryPerBlockOptin, 0)/

# file: lk_base.cuh - an SM has the shared memory of those of device 0
# case: devices: cross_entropy_backward f32
s/cudaDevAttrMaxSharedMemoryPerMultiprocessor, id)/cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0)/

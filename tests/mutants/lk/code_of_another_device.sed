# file: lk_base.cuh - what is known of the first device is taken for the second
# case: devices: logsumexp_forward f32
s/error == cudaSuccess \&\& id != lk_code_known.id)/error == cudaSuccess \&\& lk_code_known.id < 0)/

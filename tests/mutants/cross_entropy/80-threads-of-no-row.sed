# file: cross_entropy.cuh - threads without a row write what they find
# case: forward f32 auto: empty
/^    lk_cross_entropy_forward_warp_kernel(/,/^}/ s/(int)threadIdx.x < rows && result < a.rows/(int)threadIdx.x < rows/

# file: cross_entropy.cuh - forward: the rows of a warp write one state
# case: forward f32 auto: full warps
/^    lk_cross_entropy_forward_warp_kernel(/,/^}/ s/states\[threadIdx.x >> team_log2\]/states[threadIdx.x \/ 32]/

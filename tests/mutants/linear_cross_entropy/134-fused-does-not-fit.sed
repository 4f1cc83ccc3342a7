# file: linear_cross_entropy.cuh - path 0 takes a fused plan that does not fit
# case: plans of path 0
s/fused.path = chunk \&\& fused.workspace_bytes <= room ? path : 0;/fused.path = path;/

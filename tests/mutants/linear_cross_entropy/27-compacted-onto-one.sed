# file: linear_cross_entropy.cuh - two warps' counted tokens take the same rows
s/left += i < warp ? warps\[i\] : 0, seen/left += i + 1 < warp ? warps[i] : 0, seen/

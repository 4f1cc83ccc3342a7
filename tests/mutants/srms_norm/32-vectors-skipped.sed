# file: srms_norm.cuh - the first vectors behind those that are held are left out
# case: forward f32 warp: lengths
s/int vec = at\.vec + U \* 32; vec/int vec = at.vec + (U + 1) * 32; vec/

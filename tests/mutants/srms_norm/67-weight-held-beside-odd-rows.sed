# file: srms_norm.cuh - a weight is held as vectors though rows do not start on 16 bytes
# case: forward bf16 warp: odd rows
s/plain && (uintptr_t)a->x % 16 == 0 && a->x_stride % LK_VEC<T> == 0 &&/plain \&\&/

# file: srms_norm.cuh - forward checks the alignment of x before anything else
# case: forward f32: errors
/lk_srms_norm_forward_check(/,/^}/ s/^    if (!query && a->rows != 0)/    if ((uintptr_t)a->x % sizeof(T)) return lk_fail(LK_ERR_ALIGNMENT, op, "x is not aligned");\n&/

# file: srms_norm.cuh - without rows dweight is left as it is
# case: backward f32 auto: empty
s/if (status || !a->dweight) return status;/if (status || !a->dweight || a->rows == 0) return status;/

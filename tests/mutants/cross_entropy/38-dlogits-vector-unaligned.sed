# file: cross_entropy.cuh - gradients are stored in vectors whatever their alignment
# case: backward f32: errors
s/wide = (uintptr_t)out % (N \* sizeof(D)) == 0;/wide = true;/

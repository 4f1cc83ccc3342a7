# file: cross_entropy.cuh - gradients are stored in vectors whatever their alignment
s/wide = (uintptr_t)out % (N \* sizeof(D)) == 0;/wide = true;/

# file: linear_cross_entropy.cuh - path 0 divides by the lengths of a plan of kept logits that there is not
s/^    if (!plan->path) return;//

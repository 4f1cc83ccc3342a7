# file: linear_cross_entropy.cuh - logits are put into a dweight at any address
# case: corners backward auto
s/ || (uintptr_t)a.dweight % 256) return 0;/) return 0;/

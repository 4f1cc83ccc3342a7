# file: linear_cross_entropy.cuh - logits are put into a dweight that is added to
# case: switches alone forward_backward fused
s/if (!a.dweight || a.accumulate || /if (!a.dweight || /

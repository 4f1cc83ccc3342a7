# file: linear_cross_entropy.cuh - logits are put into a dweight that is added to
s/if (!a.dweight || a.accumulate || /if (!a.dweight || /

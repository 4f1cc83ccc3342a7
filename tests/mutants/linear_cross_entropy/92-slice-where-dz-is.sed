# file: linear_cross_entropy.cuh - slices have no place of their own
# case: rounding alike f16
s/w.slice = (float \*)lk_lce_take(base, \&used, slice > lent, .*/w.slice = slice > lent ? (float *)w.logits : NULL;/

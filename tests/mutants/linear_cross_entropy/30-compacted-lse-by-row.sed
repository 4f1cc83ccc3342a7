# file: linear_cross_entropy.cuh - backward reads the lse of the row, not of the token
# case: switches alone backward auto
s/label.counted ? p.c.saved_lse\[token\] : 0.0f;/label.counted ? p.c.saved_lse[row] : 0.0f;/

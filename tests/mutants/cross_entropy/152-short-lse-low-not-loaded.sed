# file: cross_entropy.cuh - short rows: lse_low is not read
# case: lse_low, auto
s/^    if (there \&\& given \&\& p.given_low) lse_low = p.given_low\[row\];//

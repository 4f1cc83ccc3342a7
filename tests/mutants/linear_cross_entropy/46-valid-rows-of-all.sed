# file: linear_cross_entropy.cuh - valid_rows counts ignored tokens
# case: options forward auto
s/\*a.valid_rows = s.counted;/*a.valid_rows = a.tokens;/

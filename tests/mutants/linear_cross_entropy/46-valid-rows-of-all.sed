# file: linear_cross_entropy.cuh - valid_rows counts ignored tokens
s/\*a.valid_rows = s.counted;/*a.valid_rows = a.tokens;/

# file: linear_cross_entropy.cuh - fused, a last group of dweight is stored whole
# case: forward_backward fused, rows with gaps
s/p.wide_dweight = \(.*\) \&\& a.hidden % 8 == 0;/p.wide_dweight = \1;/

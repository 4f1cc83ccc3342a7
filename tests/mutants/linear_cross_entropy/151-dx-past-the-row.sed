# file: linear_cross_entropy.cuh - fused, a last group of dx is stored whole
# case: forward_backward fused, rows with gaps
s/p.wide_dx = \(.*\) \&\& a.hidden % 8 == 0;/p.wide_dx = \1;/

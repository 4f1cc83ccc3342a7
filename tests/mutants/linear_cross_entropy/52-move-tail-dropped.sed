# file: linear_cross_entropy.cuh - the last column of a row is not moved
# case: forward, backward and forward_backward f16
s/for (int i = first; i < left \&\& i < first + 8; i++)/for (int i = first; i + 1 < left \&\& i < first + 8; i++)/

# file: linear_cross_entropy.cuh - fused, dx of compacted rows goes to the first tokens
# case: switches alone forward_backward fused
s/!here ? -1 : w.token ? w.token\[p.q.first_row + at\] : p.q.first_row + at/!here ? -1 : p.q.first_row + at/

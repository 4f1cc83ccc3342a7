# file: linear_cross_entropy.cuh - the references of all chunks but the first are guessed from nothing
# case: forward_backward fused, many rows
s/^    if (!c.compact) p.q.rows = c.rows, .*//

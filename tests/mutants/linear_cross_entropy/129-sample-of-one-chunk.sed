# file: linear_cross_entropy.cuh - the references of all chunks but the first are guessed from nothing
s/^    if (!c.compact) p.q.rows = c.rows, .*//

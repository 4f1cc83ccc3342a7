# file: linear_cross_entropy.cuh - the last slice of a chunk is left out where it is shorter
# case: options backward chunks
s/from < q.rows \&\& !status; from += step/from + step <= q.rows \&\& !status; from += step/

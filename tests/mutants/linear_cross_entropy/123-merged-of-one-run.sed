# file: linear_cross_entropy.cuh - a row is merged from its first runs alone
s|run < p.runs; run += 32|run < 1; run += 32|

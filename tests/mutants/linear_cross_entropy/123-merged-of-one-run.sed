# file: linear_cross_entropy.cuh - a row is merged from its first runs alone
# case: forward fused, many rows
s|run < p.runs; run += 32|run < 1; run += 32|

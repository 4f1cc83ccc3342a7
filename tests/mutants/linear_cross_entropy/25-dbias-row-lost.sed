# file: linear_cross_entropy.cuh - dbias lacks the last row of each share
# case: backward: path 0 and the path by name
s/(split + 1) \* share < p.q.rows ? (split + 1) \* share : p.q.rows;/(split + 1) * share < p.q.rows ? (split + 1) * share - 1 : p.q.rows;/

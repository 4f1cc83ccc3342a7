# file: linear_cross_entropy.cuh - one token above max_counted goes unnoticed
# case: options forward panels
s/s.counted > p.c.rows, s.bad};/s.counted > p.c.rows + 1, s.bad};/

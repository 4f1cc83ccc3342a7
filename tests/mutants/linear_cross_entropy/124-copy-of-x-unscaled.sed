# file: linear_cross_entropy.cuh - fused, sums of 24 bits are of x itself
# case: rounding alike bf16
s|&p.x, w.x, q.rows, a.hidden, w.x_stride|\&p.x, (const lk_bf16 *)a.x + q.first_row * a.x_stride, q.rows, a.hidden, a.x_stride|

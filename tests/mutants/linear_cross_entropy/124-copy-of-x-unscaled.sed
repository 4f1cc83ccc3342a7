# file: linear_cross_entropy.cuh - fused, dweight is made from x itself
# case: accuracy bf16
s|&p.x, w.x, q.rows, a.hidden, w.x_stride|\&p.x, (const lk_bf16 *)a.x + q.first_row * a.x_stride, q.rows, a.hidden, a.x_stride|

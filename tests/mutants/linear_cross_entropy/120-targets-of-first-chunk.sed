# file: linear_cross_entropy.cuh - every chunk has the targets of the first
# case: rounding alike bf16
s|w.target\[p.q.first_row + row + 8 \* r\]|w.target[row + 8 * r]|

# file: linear_cross_entropy.cuh - the reduced loss lacks the last row
# case: forward, backward and forward_backward f32
s/row < p.c.rows; row += LK_LCE_THREADS) {/row + 1 < p.c.rows; row += LK_LCE_THREADS) {/

# file: cross_entropy.cuh - forward_backward: where no row can be ignored a mean is over one row
# case: forward, then backward f32
s/plan.valid = known ? a.rows : 1;/plan.valid = 1;/

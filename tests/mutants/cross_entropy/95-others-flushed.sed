# file: cross_entropy.cuh - forward_backward: the others of a target far above them are raised in one step
# case: forward_backward f32 auto: special values
/0.5f \* rest.max + 0.5f \* logit/d

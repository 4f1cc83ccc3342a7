# file: logsumexp.cuh - the barrier between two halvings is gone
# case: forward f32 column: lengths
/this half is merged before it is halved again/d

# file: logsumexp.cuh - the barrier between the states and their merging is gone
# case: forward f32 column: empty
/the states are written before others merge them/d

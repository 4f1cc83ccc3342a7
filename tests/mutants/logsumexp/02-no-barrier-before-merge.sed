# file: logsumexp.cuh - the barrier between the states and their merging is gone
/the states are written before others merge them/d

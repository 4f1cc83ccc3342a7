# file: logsumexp.cuh - the barrier between two halvings is gone
/this half is merged before it is halved again/d

# file: logsumexp.cuh - a thread leaves out its last vector
s/(rank < over)/(rank + 1 < over)/

# file: cross_entropy.cuh - backward leaves out a thread's last vector
s/(rank < (vecs \& (team - 1))), hit = /(rank + 1 < (vecs \& (team - 1))), hit = /

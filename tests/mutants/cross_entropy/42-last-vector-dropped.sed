# file: cross_entropy.cuh - gradients leave out a thread's last vector
# case: forward, then backward f32
s/(at.rank < (at.vecs \& (at.team - 1)));/(at.rank + 1 < (at.vecs \& (at.team - 1)));/

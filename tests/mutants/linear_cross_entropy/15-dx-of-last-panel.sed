# file: linear_cross_entropy.cuh - dx is that of the last panel
# case: forward, backward and forward_backward f32
s/m.add = !q.first;/m.add = 0;/

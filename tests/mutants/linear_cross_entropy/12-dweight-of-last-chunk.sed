# file: linear_cross_entropy.cuh - dweight is that of the last chunk
# case: forward, backward and forward_backward f32
s/m.add = q.first_row > 0 || (a.accumulate \&\& !w.dweight);/m.add = a.accumulate \&\& !w.dweight;/

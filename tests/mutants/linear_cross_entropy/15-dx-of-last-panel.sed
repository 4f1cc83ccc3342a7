# file: linear_cross_entropy.cuh - dx is that of the last panel
s/m.add = !q.first;/m.add = 0;/

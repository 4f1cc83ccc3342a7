# file: linear_cross_entropy.cuh - dx multiplies with the weight of the first panel
# case: forward, backward and forward_backward f32
s/m.a = (const T \*)a.weight + q.first_col \* a.weight_stride, m.b = w.logits;/m.a = a.weight, m.b = w.logits;/

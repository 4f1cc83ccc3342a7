# file: linear_cross_entropy.cuh - dx multiplies with the weight of the first panel
s/m.a = (const T \*)a.weight + q.first_col \* a.weight_stride, m.b = w.logits;/m.a = a.weight, m.b = w.logits;/

# file: cross_entropy.cuh - gradients are written as if their rows were packed
s/at.row \* a.dlogits_stride/at.row * a.vocab/;s/row \* a.dlogits_stride + found.y/row * a.vocab + found.y/

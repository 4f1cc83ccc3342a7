# file: cross_entropy.cuh - gradients are written as if their rows were packed
s/at.row \* a.dlogits_stride/at.row * a.vocab/;s/row \* a.dlogits_stride + aside->y/row * a.vocab + aside->y/

# file: cross_entropy.cuh - backward writes rows as if they were packed
s/(D \*)a.dlogits + own \* a.dlogits_stride/(D *)a.dlogits + own * a.vocab/

# file: cross_entropy.cuh - backward writes rows as if they were packed
s/(D \*)a.dlogits + row \* a.dlogits_stride;/(D *)a.dlogits + row * a.vocab;/

# file: linear_cross_entropy.cuh - a block counts its own first token among those to its left
s/if (!right) s.before = s.counted;/if (!right) s.before = s.counted + (begin > 0);/

# file: logsumexp.cuh - columns whose sums left the range of floats are kept
s/if (!(most < LK_LSE_LIMIT))/if (false)/

# file: logsumexp.cuh - columns whose sums left the range of floats are kept
# case: forward f32 column: scales
s/if (!(most < LK_LSE_LIMIT))/if (false)/

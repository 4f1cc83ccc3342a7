# file: cross_entropy.cuh - queries look at alignments
# case: forward
s/if (status || arch == LK_CROSS_ENTROPY_QUERY) return status;/if (status) return status;/

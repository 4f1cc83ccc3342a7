# file: logsumexp.cuh - lse may have more elements than can be counted
# case: forward f32: errors
s/if (outer > ((int64_t)1 << 62) \/ inner)/if (false)/

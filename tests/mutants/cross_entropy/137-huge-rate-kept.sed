# file: cross_entropy.cuh - gradients: a rate whose product with the logits 2^x cannot make up for is kept
# case: forward_backward f32 block: huge logits
s/if (fabsf(rate \* value) < LK_LSE_BASE) return rate;/if (lk_is_finite(rate * value)) return rate;/

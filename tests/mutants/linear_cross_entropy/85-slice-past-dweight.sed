# file: linear_cross_entropy.cuh - more logits are put into dweight than it has room for
# case: corners backward auto
s/lk_lce_lent_bytes(c, chunk) \/ (lk_lce_round_up(c->a.vocab, 64) \* 4)/lk_lce_lent_bytes(c, chunk) \/ (lk_lce_round_up(c->a.vocab, 64) * 2)/

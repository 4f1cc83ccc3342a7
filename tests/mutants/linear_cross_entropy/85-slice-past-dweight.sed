# file: linear_cross_entropy.cuh - more logits are put into dweight than it has room for
# case: corners backward auto
s|\(lk_lce_type_bytes(a.dweight_dtype)\) / (lk_lce_round_up(a.vocab, 64) \* 4)|\1 / (lk_lce_round_up(a.vocab, 64) * 2)|

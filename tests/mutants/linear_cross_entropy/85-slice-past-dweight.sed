# file: linear_cross_entropy.cuh - more logits are put into dweight than it has room for
s/a.dweight_dtype) \/ (lk_lce_round_up(a.vocab, 64) \* 4);/a.dweight_dtype) \/ (lk_lce_round_up(a.vocab, 64) * 2);/

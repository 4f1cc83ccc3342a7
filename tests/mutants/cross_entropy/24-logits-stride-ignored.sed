# file: cross_entropy.cuh - forward takes rows for packed
s/(row < a.rows ? row : 0) \* a.logits_stride/(row < a.rows ? row : 0) * a.vocab/

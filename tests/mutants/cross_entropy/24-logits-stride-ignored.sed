# file: cross_entropy.cuh - rows of logits are taken for packed
# case: forward, then backward f32
s/(const T \*)a.logits + row \* a.logits_stride;/(const T *)a.logits + row * a.vocab;/

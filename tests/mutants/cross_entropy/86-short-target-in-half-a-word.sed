# file: cross_entropy.cuh - short rows: the target of 16 bits is blanked in the lower half of its word
# case: backward f16: the target's gradient
s/: 0xffffu << (unsigned)place % each \* 16/: 0xffffu/

# file: linear_cross_entropy.cuh - logits of the next chunk are put over the sums of dweight
# case: rounding alike bf16
s/const bool at_the_end = .*/const bool at_the_end = true;/

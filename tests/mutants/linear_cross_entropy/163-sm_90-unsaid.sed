# file: linear_cross_entropy.cuh - code for sm_90 without the a goes without a word
# case: plans where fused is left out
s/c->note = ": the code that this .*/c->note = "";/

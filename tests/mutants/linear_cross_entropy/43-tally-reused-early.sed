# file: linear_cross_entropy.cuh - a block's tally is overwritten while it is read
# case: corners forward auto
s/__syncthreads(); .. lk_lce_tally_block's memory has been read .*/;/

# file: cross_entropy.cuh - the last column of the padding is left as it is
# case: forward, then backward bf16
s/end < p.padded_end; end += at.team/end + 1 < p.padded_end; end += at.team/

# file: linear_cross_entropy.cuh - with no token valid_rows is left as it was
# case: corners forward auto
s/if (none \&\& threadIdx.x == 0 \&\& a.valid_rows)/if (false)/

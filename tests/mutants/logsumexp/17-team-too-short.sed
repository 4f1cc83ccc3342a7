# file: lk_base.cuh - the warp reduction of the sums leaves out its widest step
# case: lk_lse: values 0
s/if (offset < team) sum +=/if (2 * offset < team) sum +=/

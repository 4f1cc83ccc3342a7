# file: cross_entropy.cuh - the count takes what a block has no target for as targets
# case: forward, then backward f32
s/__popc(counted & .*$/__popc(counted);/

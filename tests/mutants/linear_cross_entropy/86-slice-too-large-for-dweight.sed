# file: linear_cross_entropy.cuh - slices are put into dweight whatever their length
# case: corners backward auto
s/if (slice \&\& slice <= lent) w.slice/if (slice \&\& lent) w.slice/

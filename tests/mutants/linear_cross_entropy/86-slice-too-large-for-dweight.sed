# file: linear_cross_entropy.cuh - slices are put into dweight whatever their length
s/if (slice \&\& slice <= lent) w.slice/if (slice \&\& lent) w.slice/

# file: linear_cross_entropy.cuh - too many counted tokens leave dweight and dbias as they were
# case: options backward panels
s/if (over || (none \&\& !a.accumulate)) {/if (none \&\& !a.accumulate) {/

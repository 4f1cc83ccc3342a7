# file: cross_entropy.cuh - the target's element stays what the stream wrote
# case: forward, then backward f32
s/^    if (owner && aside->y >= 0) {/    if (owner \&\& aside->y == INT32_MAX) {/

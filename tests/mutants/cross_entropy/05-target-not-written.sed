# file: cross_entropy.cuh - the target's element stays what the stream wrote
s/^    if (found.y < 0) return;/    if (found.y < INT32_MAX) return;/

# file: cross_entropy.cuh - the target's element stays what the stream wrote
s/^    lk_put(dlogits + y, v \* slope);/    if (v < -3e38f) lk_put(dlogits + y, v * slope);/

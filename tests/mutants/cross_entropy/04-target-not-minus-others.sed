# file: cross_entropy.cuh - the target's gradient has p - 1, not minus the sum of the others
s/aside->fixed) - aside->rest \* sums\[0\];/aside->fixed) - aside->rest * (1.0f - lk_exp(fmaf(g.scale, v, -g.lse)));/

# file: cross_entropy.cuh - forward_backward: what has no slot is not summed
# case: forward_backward f32 auto: switches
s/^    if (read \&\& more) sum += lk_ce_gather_more/    if (read \&\& more \&\& base == -INFINITY) sum += lk_ce_gather_more/

# file: cross_entropy.cuh - dlogits in place may have another stride
# case: backward f32: errors
s/if (in_place \&\& a->rows > 1 \&\& a->dlogits_stride/if (false \&\& a->dlogits_stride/

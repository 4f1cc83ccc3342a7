# file: md_lrpe_cosine.cuh - a workspace of more bytes than can be counted is taken for small
# case: backward f32: errors
s/if (share\.slots > ((int64_t)1 << 60) \/ heads \/ dim)/if (false)/

# file: srms_norm.cuh - x and residual go through the kernel that knows one source of s
# case: backward f32 auto: graph
s/held && a->dy && !a->residual && /held \&\& a->dy \&\& /

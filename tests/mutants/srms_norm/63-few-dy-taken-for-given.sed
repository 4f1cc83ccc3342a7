# file: srms_norm.cuh - dy is read for few rows though it may be NULL
# case: backward f32 auto: few rows
s/if (BARE || p\.p\.dy\.rows) lk_unpack(g\[u\], dy/lk_unpack(g[u], dy/

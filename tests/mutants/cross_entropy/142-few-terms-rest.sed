# file: cross_entropy.cuh - of few rows' terms those beyond the last group of four are left out
# case: forward f32: the terms of few rows
s/if (thread < (int)p\.rows % 4) rest/if (false) rest/

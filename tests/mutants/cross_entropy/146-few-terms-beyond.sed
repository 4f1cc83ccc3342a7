# file: cross_entropy.cuh - of few rows' terms groups behind the last are read
# case: forward f32: the terms of few rows
s/if (thread + u \* THREADS < whole) t\[u\]/if (thread + u * THREADS <= whole) t[u]/

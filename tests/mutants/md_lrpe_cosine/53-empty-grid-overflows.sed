# file: md_lrpe_cosine.cuh - the axes of an empty grid are multiplied
# case: forward f32 auto: empty
s/if (cells) behind \*= a\.shape\[i\];/if (a.shape[i] > 0) behind *= a.shape[i];/

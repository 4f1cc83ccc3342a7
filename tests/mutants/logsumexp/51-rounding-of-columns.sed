# file: logsumexp.cuh - columns that are read again forget what scale x was rounded by
# case: forward f32 column: offsets
s/lk_lse_add(s\[j\], one, 1\.0f, &low)/lk_lse_add(s[j], one)/

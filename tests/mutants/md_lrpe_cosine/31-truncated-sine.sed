# file: md_lrpe_cosine.cuh - sines are those of half a turn less precision
s/0x1.921fb6p-30f/0x1.921p-30f/

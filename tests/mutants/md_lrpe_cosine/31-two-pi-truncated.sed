# file: md_lrpe_cosine.cuh - 2 pi has 12 bits
# case: forward f32 auto: axes
s/0x1.921fb6p-30f/0x1.921p-30f/

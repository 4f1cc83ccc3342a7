# file: md_lrpe_cosine.cuh - partial sums are added before they are there
# case: backward f32 auto: empty
/part is complete up to 2 half/d

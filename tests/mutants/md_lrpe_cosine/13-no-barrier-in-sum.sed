# file: md_lrpe_cosine.cuh - partial sums are added before they are there
/part is complete up to 2 half/d

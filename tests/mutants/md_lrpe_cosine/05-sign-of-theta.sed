# file: md_lrpe_cosine.cuh - theta counts as its magnitude
s/return theta >> 31 ? 0 - turn : turn;/return turn;/

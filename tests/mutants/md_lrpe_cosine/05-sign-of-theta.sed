# file: md_lrpe_cosine.cuh - theta counts as its magnitude
s/turn = (turn ^ sign) - sign;/(void)sign;/

# file: md_lrpe_cosine.cuh - theta counts as its magnitude
s/return (turn ^ sign) - sign;/return (void)sign, turn;/

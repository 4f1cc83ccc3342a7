# file: md_lrpe_cosine.cuh - theta counts as its magnitude
# case: forward f32 auto: axes
s/return (turn ^ sign) - sign;/return (void)sign, turn;/

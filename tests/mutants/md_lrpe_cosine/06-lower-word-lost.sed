# file: md_lrpe_cosine.cuh - theta has 32 bits of turns
# case: forward f32 auto: positions and thetas
s/ + (uint32_t)__mulhi(s, turn.low);/;/

# file: md_lrpe_cosine.cuh - theta has 32 bits of turns
s/ + (uint32_t)__mulhi(s, turn.low);/;/

# file: md_lrpe_cosine.cuh - a walk turns the tokens of the prefix
# case: forward f32 auto: empty
s/const float turn = still ? 0.0f : /const float turn = /

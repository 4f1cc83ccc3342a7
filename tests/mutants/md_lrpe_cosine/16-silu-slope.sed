# file: md_lrpe_cosine.cuh - the gradient of silu is its first term
# case: backward f32 auto: prefix
s/(silu ? fmaf(x\[j\], other, 1.0f) : other)/(silu ? 1.0f : other)/

# file: md_lrpe_cosine.cuh - the gradient of silu is its first term
s/(silu ? fmaf(x\[j\], other, 1.0f) : other)/(silu ? 1.0f : other)/

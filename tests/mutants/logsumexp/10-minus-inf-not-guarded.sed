# file: lk_base.cuh - exponents are taken against -inf where nothing else was seen
s/return fabsf(max) <= 3.402823466e38f ? max : 0.0f;/return max;/

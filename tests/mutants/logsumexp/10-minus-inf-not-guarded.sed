# file: lk_base.cuh - exponents are taken against -inf where nothing else was seen
s/return lk_is_finite(max) ? max : 0.0f;/return max;/

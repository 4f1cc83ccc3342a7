# file: lk_base.cuh - exponents are taken against -inf where nothing else was seen
# case: lk_lse: values 0
s/return lk_is_finite(max) ? max : 0.0f;/return max;/

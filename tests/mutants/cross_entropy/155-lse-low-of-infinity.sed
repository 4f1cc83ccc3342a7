# file: cross_entropy.cuh - lse_low of an infinite lse is NaN
# case: special values
s/r.lse_low = lk_is_finite(r.lse) ? \(.*\) : 0.0f;/r.lse_low = \1;/

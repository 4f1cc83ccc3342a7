# file: cross_entropy.cuh - the sum over no row is -0
# case: forward f32: the terms of few rows
s/float sum = __uint_as_float(rest) + 0\.0f;/float sum = __uint_as_float(rest);/

# file: srms_norm.cuh - dweight lacks the sums of the last block
# case: backward f32 auto: options
s/row < p\.partials; row += 32/row + 1 < p.partials; row += 32/

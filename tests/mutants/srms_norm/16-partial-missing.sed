# file: srms_norm.cuh - dweight lacks the sums of the last block
s/row < p\.partials; row += 32/row + 1 < p.partials; row += 32/

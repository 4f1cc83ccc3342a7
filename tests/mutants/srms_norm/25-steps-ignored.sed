# file: srms_norm.cuh - all rows are taken to lie at the first one's offset
s/p\.offset + (int)row \* p\.offset_step/p.offset + 0 * (int)row/

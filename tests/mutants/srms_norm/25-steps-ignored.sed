# file: srms_norm.cuh - all rows are taken to lie at the first one's offset
# case: forward f32 auto: lengths
s/(unsigned)p\.offset + (unsigned)row \* (unsigned)p\.offset_step/(unsigned)p.offset + 0 * (unsigned)row/

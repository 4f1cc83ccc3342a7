# file: srms_norm.cuh - the last single element of a row is left out
# case: forward f32 auto: lengths
s/i < split\.edge;/i < split.edge - 1;/

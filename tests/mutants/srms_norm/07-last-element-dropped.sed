# file: srms_norm.cuh - the last single element of a row is left out
s/i < split\.edge;/i < split.edge - 1;/

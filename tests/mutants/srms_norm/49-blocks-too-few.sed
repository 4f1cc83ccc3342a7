# file: srms_norm.cuh - the same where there are fewer blocks than offsets
# case: backward f16 cluster: odd rows
s/blocks < turn) l->p\.aligned = 0;/blocks < 0) l->p.aligned = 0;/

# file: srms_norm.cuh - a team that sums dweight gets rows of different offsets
# case: backward f16 auto: odd rows
s/blocks -= blocks % turn;/;/

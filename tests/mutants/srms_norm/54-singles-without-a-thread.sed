# file: srms_norm.cuh - a team has fewer lanes than its row has single elements
# case: backward f16 warp: odd rows
s/const int64_t lanes = traits\.singles && /const int64_t lanes = false \&\& traits.singles \&\& /

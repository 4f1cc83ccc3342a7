# file: srms_norm.cuh - the shares of dweight are added before all are there
# case: backward f32 auto: empty
/all shares are there before the first warp adds/d

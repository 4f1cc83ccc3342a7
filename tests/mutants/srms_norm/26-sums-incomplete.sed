# file: srms_norm.cuh - the shares of dweight are added before all are there
/all shares are there before a warp adds/d

# file: srms_norm.cuh - teams add to sums that are yet to be set to 0
/nobody adds to a sum before it is 0/d

# file: srms_norm.cuh - the teams' sums for dweight are added before all are complete
/every team's sums are complete/d

# file: srms_norm.cuh - the last row of a persistent loop is left out
# case: backward f16 auto: lengths
s/row - at\.team < p\.a\.rows; row += at\.step/row - at.team + (turn > 0) < p.a.rows; row += at.step/

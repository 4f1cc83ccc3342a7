# file: srms_norm.cuh - a team takes the row behind the last for its own
s/owner = row < p\.a\.rows;/owner = row <= p.a.rows;/

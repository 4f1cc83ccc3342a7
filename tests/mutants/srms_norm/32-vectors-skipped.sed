# file: srms_norm.cuh - the first vectors behind those that are held are left out
s/int vec = at\.rank + U \* at\.size; vec/int vec = at.rank + (U + 1) * at.size; vec/

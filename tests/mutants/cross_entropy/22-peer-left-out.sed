# file: cross_entropy.cuh - the states of the last block of a cluster are left out
# case: forward f32 auto: long rows
s/for (int i = rank; i < team \/ 32; i += 32)/for (int i = rank; i < (team > 256 ? team \/ 32 - 8 : team \/ 32); i += 32)/

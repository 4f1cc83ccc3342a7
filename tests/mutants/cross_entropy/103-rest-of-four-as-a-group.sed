# file: cross_entropy.cuh - a reduced loss takes what lies behind the last row for terms
# case: forward, then backward f32
s/const int64_t whole = rows >> 2;/const int64_t whole = (rows + 3) >> 2;/; s/const bool rest = rank == 0/const bool rest = rank < 0/

# file: lk_block.cuh - a lane adds the first of its words alone
s/k < MOST; k++) s.sum +=/k < 1; k++) s.sum +=/

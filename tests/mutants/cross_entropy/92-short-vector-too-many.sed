# file: cross_entropy.cuh - short rows: every lane has as many vectors as the first
/^    lk_cross_entropy_short_kernel(/,/^}/ s/(rank < (vecs & (team - 1)));/((vecs \& (team - 1)) != 0);/

# file: cross_entropy.cuh - the sums of blocks lie where the tally does
s/(lk_ce_sums \*)(to.tally + 1))\[/(lk_ce_sums *)to.tally)[/;s/(const lk_ce_sums \*)(to.tally + 1);/(const lk_ce_sums *)to.tally;/

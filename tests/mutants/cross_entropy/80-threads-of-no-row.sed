# file: cross_entropy.cuh - lanes without a row write what they find
s/if (mine < p.a.rows) sums = lk_ce_put_plain/sums = lk_ce_put_plain/

# file: cross_entropy.cuh - short rows: what backward's base was rounded by is left out
# case: backward f32 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ s/if (proper) missed = lk_ce_unit(/if (proper) lk_ce_unit(/

# file: cross_entropy.cuh - short rows: each lane's reference is its own
/^    lk_cross_entropy_short_kernel(/,/^}/ s/if (offset < team) top = .*/;/

# file: cross_entropy.cuh - counted inside: warps of no row end before they have counted
/^    lk_cross_entropy_short_kernel(/,/^}/ s/if (full \&\& !inside \&\& !there) return;/if (full \&\& !there) return;/

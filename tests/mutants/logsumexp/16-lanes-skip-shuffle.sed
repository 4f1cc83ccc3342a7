# file: logsumexp.cuh - lanes without a row leave out the reduction of their warp
s/^    s = lk_lse_warp(s, team);/    if (owner) s = lk_lse_warp(s, team);/

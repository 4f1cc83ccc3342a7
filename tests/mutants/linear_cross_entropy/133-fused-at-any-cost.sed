# file: linear_cross_entropy.cuh - path 0 takes the fused plan where chunks are faster
# case: plans within goals.csv's workspaces
s/if (cost + apart <= lk_lce_cost(.*return;/(void)cost, (void)apart;/

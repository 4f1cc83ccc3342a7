# file: linear_cross_entropy.cuh - the state of the other columns has the target's too
s/if (at + j >= cols || at + j == hit) continue;/if (at + j >= cols) continue;/

# file: cross_entropy.cuh - the block that draws the last ticket but one adds up, before the last has left its sums
s/return atomicAdd(&to.tally->tickets, 1u) + 1;/return atomicAdd(\&to.tally->tickets, 1u) + (to.parts > 1 ? 2 : 1);/

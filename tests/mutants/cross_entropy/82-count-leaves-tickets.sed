# file: cross_entropy.cuh - forward_backward's tickets, which the count clears, are counted on from what the workspace holds
s/, p.tally->tickets = 0;/;/

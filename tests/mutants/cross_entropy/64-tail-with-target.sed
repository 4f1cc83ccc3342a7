# file: cross_entropy.cuh - forward_backward: a target that has no slot counts among the others
s/if (j != hit) part += /part += /

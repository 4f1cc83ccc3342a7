# file: cross_entropy.cuh - forward_backward: a target that has no slot counts among the others
# case: forward_backward f16 warp: rows held in part
s/if (j != hit) part += /part += /

# file: linear_cross_entropy.cuh - the state of the other columns has the target's too
# case: forward, backward and forward_backward f32
s/if (at + j >= cols || at + j == hit) continue;/if (at + j >= cols) continue;/

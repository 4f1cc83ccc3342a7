# file: linear_cross_entropy.cuh - a later panel forgets the target's logit
# case: forward, backward and forward_backward f32
s/if (!(hit >= 0 \&\& hit < cols)) target = before.target;/;/

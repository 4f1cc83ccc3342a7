# file: linear_cross_entropy.cuh - a later panel forgets the target's logit
s/if (!(hit >= 0 \&\& hit < cols)) target = before.target;/;/

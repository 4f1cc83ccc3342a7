# file: cross_entropy.cuh - any quotient of logit_scale and softcap is taken
# case: errors
s/if (!(quotient >= 0x1p-100f/if (softcap < 0.0f \&\& !(quotient >= 0x1p-100f/

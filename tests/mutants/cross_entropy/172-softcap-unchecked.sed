# file: cross_entropy.cuh - any finite softcap is taken
# case: errors
s/if (!(softcap >= 0x1p-100f \&\& softcap <= 0x1p100f))/if (softcap < 0.0f)/

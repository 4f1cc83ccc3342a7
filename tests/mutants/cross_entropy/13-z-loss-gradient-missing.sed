# file: cross_entropy.cuh - z-loss has no gradient
# case: forward, then backward f16
s/own = 2.0f \* a.z_loss \* lse \* h;/own = 0.0f;/; s/own = 2.0f \* a.z_loss \* lse \* up.h;/own = 0.0f;/

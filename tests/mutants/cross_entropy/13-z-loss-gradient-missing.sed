# file: cross_entropy.cuh - z-loss has no gradient
s/a.z_loss > 0.0f ? 2.0f \* a.z_loss \* lse \* h : 0.0f/0.0f/

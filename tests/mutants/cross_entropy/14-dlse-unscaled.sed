# file: cross_entropy.cuh - dlse is not multiplied by logit_scale
# case: forward, then backward f32
s/own = fmaf(a.logit_scale, up.dlse, own);/own += up.dlse;/

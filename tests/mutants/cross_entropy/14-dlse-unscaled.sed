# file: cross_entropy.cuh - dlse is not multiplied by logit_scale
s/own = fmaf(a.logit_scale, up.dlse, own);/own += up.dlse;/

# file: cross_entropy.cuh - dlse is not multiplied by logit_scale
s/a.logit_scale \* a.dlse\[row\]/a.dlse[row]/

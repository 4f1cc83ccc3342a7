# file: linear_cross_entropy.cuh - panels: dlse lacks logit_scale
# case: backward f32: central differences
s/a.logit_scale \* w.dlse\[row\]/w.dlse[row]/

# file: linear_cross_entropy.cuh - panels: tokens whose lse is infinite get a finite gradient
# case: not finite backward panels
s/const float rise = proper ? rest + own : NAN;/const float rise = rest + own;/;s/fmaf(proper ? own : NAN, p,/fmaf(own, p,/

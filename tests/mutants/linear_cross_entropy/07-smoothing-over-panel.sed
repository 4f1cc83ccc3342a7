# file: linear_cross_entropy.cuh - panels: smoothing is spread over the panel, not the vocabulary
s/fall = f \* __fdiv_rn(a.label_smoothing, (float)a.vocab);/fall = f * __fdiv_rn(a.label_smoothing, (float)q.cols);/

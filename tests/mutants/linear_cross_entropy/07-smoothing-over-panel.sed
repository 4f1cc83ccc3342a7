# file: linear_cross_entropy.cuh - panels: smoothing is spread over the panel, not the vocabulary
# case: forward, backward and forward_backward f32
s/fall = f \* __fdiv_rn(a.label_smoothing, (float)a.vocab);/fall = f * __fdiv_rn(a.label_smoothing, (float)q.cols);/

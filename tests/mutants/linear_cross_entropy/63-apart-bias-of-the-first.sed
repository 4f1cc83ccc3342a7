# file: linear_cross_entropy.cuh - the last columns get the bias of the first
# case: forward, backward and forward_backward f16
s/^    if (m->bias) last.bias = .*/    ;/

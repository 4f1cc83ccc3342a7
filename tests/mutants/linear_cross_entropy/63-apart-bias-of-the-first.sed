# file: linear_cross_entropy.cuh - the last columns get the bias of the first
s/^    if (m->bias) last.bias = .*/    ;/

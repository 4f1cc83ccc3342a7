# file: linear_cross_entropy.cuh - the other columns' part of dx replaces that of the last ones
# case: forward, backward and forward_backward f16
s/^    else m->add = 1;/    else m->add += 0;/

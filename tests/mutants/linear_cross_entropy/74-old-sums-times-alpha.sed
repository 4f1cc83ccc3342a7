# file: linear_cross_entropy.cuh - what a product is added to is scaled by alpha too
# case: forward, backward and forward_backward f16
s/m->add ? \&counts->one/m->add ? \&counts->alpha/

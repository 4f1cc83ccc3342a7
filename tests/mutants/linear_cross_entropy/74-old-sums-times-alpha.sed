# file: linear_cross_entropy.cuh - what a product is added to is scaled by alpha too
s/m->add ? \&counts->one/m->add ? \&counts->alpha/

# file: linear_cross_entropy.cuh - exponentials have no slope under a softcap
# case: switches alone forward_backward fused
s|if (!plain \&\& e.j. > 0.0f) e.j. \*= slope;|;|

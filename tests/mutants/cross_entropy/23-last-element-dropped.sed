# file: cross_entropy.cuh - forward leaves out the last single element of a row
# case: forward, then backward f32
s/for (int i = rank; i < aside->split.edge; i += team)/for (int i = rank; i < aside->split.edge - 1; i += team)/

# file: cross_entropy.cuh - a bad target counts in weight_sum where there are no class weights
# case: reduced
s/if (u \* THREADS < left \&\& label.y >= 0) w\[u\] = /if (u * THREADS < left \&\& (a.class_weight ? label.y >= 0 : label.counted)) w[u] = /

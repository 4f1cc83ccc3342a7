# file: linear_cross_entropy.cuh - the bytes that a plan says it uses have another plan
# case: plans of plans
s/for (size_t before = 0; before != budget;) {/for (size_t before = 0; before == 0;) {/

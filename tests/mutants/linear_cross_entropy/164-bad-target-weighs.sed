# file: linear_cross_entropy.cuh - without class weights a bad target counts in weight_sum
# case: options forward
s/(float)(s.counted - s.bad);/valid;/

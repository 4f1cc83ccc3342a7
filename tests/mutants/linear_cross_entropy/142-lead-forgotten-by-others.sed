# file: linear_cross_entropy.cuh - clusters with more of dx do not leave out the rounds that the others led
# case: forward_backward fused, many rows
s/int i = p.lead \* late + turn \* clusters + behind;/int i = turn * clusters + behind;/

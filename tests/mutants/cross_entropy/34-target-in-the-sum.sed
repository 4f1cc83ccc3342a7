# file: cross_entropy.cuh - the sum of the other p has the target's too
# case: forward, then backward f32
s/part\[j % 2\] += j == hit ? 0.0f : e;/part[j % 2] += e;/

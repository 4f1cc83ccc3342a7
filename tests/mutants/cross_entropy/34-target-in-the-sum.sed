# file: cross_entropy.cuh - the sum of the other p has the target's too
s/const float p = j == hit ? 0.0f : lk_exp/const float p = lk_exp/

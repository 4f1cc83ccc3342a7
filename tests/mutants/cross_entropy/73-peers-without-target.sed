# file: cross_entropy.cuh - the target's logit reaches the first block of a cluster only
# case: forward_backward f32: the target's gradient
s/for (int peer = 0; owner \&\& peer < blocks; peer++)/for (int peer = 0; owner \&\& peer < 1; peer++)/

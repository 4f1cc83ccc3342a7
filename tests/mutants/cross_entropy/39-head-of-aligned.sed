# file: cross_entropy.cuh - the target's logit is looked for as if every row were aligned
# case: forward, then backward f32
s/const int inner = y - at.head;/const int inner = y;/

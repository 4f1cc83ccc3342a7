# file: cross_entropy.cuh - a bad target's loss is that of a target at -inf
# case: forward, then backward f32
s/^    if (label.bad) r.class_loss = NAN;//

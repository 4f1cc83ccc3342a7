# file: cross_entropy.cuh - a bad target's loss is that of a target at -inf
s/^    if (label.bad) r.class_loss = NAN;//

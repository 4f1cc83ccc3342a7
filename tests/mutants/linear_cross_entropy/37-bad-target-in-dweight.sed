# file: linear_cross_entropy.cuh - a bad target's row has a gradient
# case: switches alone backward auto
s/float factor = good ? (!all_alike/float factor = label.counted ? (!all_alike/;s/over == 0.0f || !good ? 0.0f/over == 0.0f || !label.counted ? 0.0f/

# file: cross_entropy.cuh - an ignored row leaves 0 for its class term
# case: forward, then backward f32
s/!label.counted ? __uint_as_float(LK_CE_IGNORED) :/!label.counted ? 0.0f :/

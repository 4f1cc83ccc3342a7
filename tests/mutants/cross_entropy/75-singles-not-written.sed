# file: cross_entropy.cuh - gradients of single elements are left out where rows begin aligned
# case: forward, then backward f32
s/plan.more = !whole || /plan.more = (uintptr_t)a.logits % 16 || /

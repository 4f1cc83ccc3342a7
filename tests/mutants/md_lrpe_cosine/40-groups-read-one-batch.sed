# file: md_lrpe_cosine.cuh - all groups read the batches of the first
# case: forward f32 auto: axes
s/p.in_stride, at.batch + group, at.head/p.in_stride, at.batch + 0 * group, at.head/

# file: md_lrpe_cosine.cuh - a group leaves out the batch of a round that not all groups have
# case: forward f32 auto: axes
s/(at.batches - group - 1) \/ K + 1/(at.batches - group) \/ K/

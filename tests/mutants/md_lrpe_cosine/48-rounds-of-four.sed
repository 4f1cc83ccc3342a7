# file: md_lrpe_cosine.cuh - two groups take as few rounds over the batch as four
# case: forward bf16 vector: walks
s/(at.batches - group - 1) \/ K + 1/(at.batches - group - 1) \/ LK_LRPE_GROUPS + 1/

# file: md_lrpe_cosine.cuh - a walk goes one token past the last
# case: forward f32 auto: batches
s/at.tokens = p.tokens_each - (.*);/at.tokens = p.tokens_each;/

# file: md_lrpe_cosine.cuh - a walk goes one token past the last
s/at.tokens = p.tokens_each - (.*);/at.tokens = p.tokens_each;/

# file: md_lrpe_cosine.cuh - a misaligned workspace is accepted
# case: backward f32: errors
s/ || (uintptr_t)a.workspace % 256//

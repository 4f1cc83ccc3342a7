# file: md_lrpe_cosine.cuh - a misaligned workspace is accepted
s/ || (uintptr_t)a.workspace % 256//

# file: md_lrpe_cosine.cuh - a walk counts cells from the first token, whatever the prefix
# case: forward f32 auto: axes
s/p->walk_cells = p->walk_back \* size - a.prefix;/p->walk_cells = 0;/

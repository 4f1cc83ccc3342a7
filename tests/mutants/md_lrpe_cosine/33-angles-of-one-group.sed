# file: md_lrpe_cosine.cuh - all groups put their angles where the first does
# case: forward f32 auto: axes
s/table\[(group \* M + i) \* S + vector\]/table[(0 * group * M + i) * S + vector]/

# file: md_lrpe_cosine.cuh - all groups put their angles where the first does
s/table\[(group \* M + i) \* S + vector\]/table[(0 * group * M + i) * S + vector]/

# file: md_lrpe_cosine.cuh - lanes that only fill up a team add to the softmax of its row
# case: forward f32 auto: dims
s/owner ? (part\[0\] + part\[1\]) + (part\[2\] + part\[3\]) : 0.0f/(void(owner), (part[0] + part[1]) + (part[2] + part[3]))/

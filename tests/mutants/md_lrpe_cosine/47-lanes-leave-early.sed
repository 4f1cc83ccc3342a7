# file: md_lrpe_cosine.cuh - lanes without a vector leave out the softmax of their warp, where a loop counts steps
# case: forward f32 auto: dims
s/steps = ACT ? p.steps : count/steps = count/

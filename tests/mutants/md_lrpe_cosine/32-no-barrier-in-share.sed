# file: md_lrpe_cosine.cuh - a group takes angles that another has not put there yet
# case: forward f32 auto: axes
/all groups have put their angles there/d

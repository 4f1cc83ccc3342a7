# file: md_lrpe_cosine.cuh - offset is not added on grids of several axes
# case: forward f32 auto: axes
s/return (int)index + grid.offset\[axis\];/return (int)index;/

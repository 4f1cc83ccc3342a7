# file: md_lrpe_cosine.cuh - offset is not added on grids of several axes
s/return (int)index + grid.offset\[axis\];/return (int)index;/

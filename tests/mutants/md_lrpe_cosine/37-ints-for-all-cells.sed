# file: md_lrpe_cosine.cuh - ints count the cells of every grid with few items
# case: places in large grids
s/ && tokens + behind < 1 << 30;/;/

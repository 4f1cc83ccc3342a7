# file: md_lrpe_cosine.cuh - ints count the cells of every grid with few items
s/ && tokens + behind < 1 << 30;/;/

# file: lk_base.cuh - forward leaves out the last single element of a row
s/share\.split\.edge/(share.split.edge - 1)/

# file: lk_base.cuh - forward leaves out the last single element of a row
# case: forward f32 auto: lengths
s/share\.split\.edge/(share.split.edge - 1)/

# file: md_lrpe_cosine.cuh - dx is written with the strides of dy
# case: backward f32 auto: empty
s/(T \*)p.out + lk_lrpe_offset(p.out_stride, batch, at.head, token)/(T *)p.out + lk_lrpe_offset(p.in_stride, batch, at.head, token)/

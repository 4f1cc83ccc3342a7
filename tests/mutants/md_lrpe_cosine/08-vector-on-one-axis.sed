# file: md_lrpe_cosine.cuh - all features of a vector turn with the axis of the first
# case: backward f32 auto: axes
s/s\[j\] = j < left ? here : next;/s[j] = here;/

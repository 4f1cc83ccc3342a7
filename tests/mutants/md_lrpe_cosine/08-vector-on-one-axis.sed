# file: md_lrpe_cosine.cuh - all features of a vector turn with the axis of the first
s/s\[j\] = j < left ? here : next;/s[j] = here;/

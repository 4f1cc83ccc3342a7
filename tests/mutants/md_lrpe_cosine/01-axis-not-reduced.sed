# file: md_lrpe_cosine.cuh - the position on an inner axis keeps what belongs to the axis before it
# case: forward f32 auto: axes
s/if (axis > 0) index -=/if (axis > 7) index -=/

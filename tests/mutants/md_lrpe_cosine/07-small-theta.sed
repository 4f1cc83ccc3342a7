# file: md_lrpe_cosine.cuh - the turns of a theta below 2^-8 lose their upper words
# case: forward f32 auto: axes
s/shift < 32 ? word_1 : shift < 64 ? word_2 : 0;/shift < 32 ? word_1 : 0;/

# file: md_lrpe_cosine.cuh - a walk begins at its position modulo 2^32, as one does in a prefix before position -2^31
# case: forward f32 vector: walks
s/const int64_t s = j < at.left ? at.s\[0\] : at.s\[1\],/const int64_t s = (int)(j < at.left ? at.s[0] : at.s[1]),/

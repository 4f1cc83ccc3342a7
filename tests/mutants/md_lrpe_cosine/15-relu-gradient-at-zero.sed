# file: md_lrpe_cosine.cuh - relu passes the gradient at 0
# case: backward f32 auto: activations
s/g\[j\] = x\[j\] <= 0.0f ? 0.0f : g\[j\];/g[j] = x[j] < 0.0f ? 0.0f : g[j];/

# file: md_lrpe_cosine.cuh - the row path leaves out the last piece of a row
# case: forward f32 auto: dims
s/feature - (int)(threadIdx.x % 32) < p.dim;/feature - (int)(threadIdx.x % 32) < p.dim - 1;/

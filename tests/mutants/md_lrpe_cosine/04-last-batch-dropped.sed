# file: md_lrpe_cosine.cuh - a short stretch of the batch loses its last batch
# case: forward f32 auto: batches
s/(int)(p.batch - at.batch < p.stretch ? p.batch - at.batch : p.stretch)/(int)(p.batch - at.batch < p.stretch ? p.batch - at.batch - 1 : p.stretch)/

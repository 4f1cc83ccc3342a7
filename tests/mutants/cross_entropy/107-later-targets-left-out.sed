# file: cross_entropy.cuh - the count has what its blocks load first, and no more
# case: forward f32 auto: reduced
s/first < a.rows; first += step/first < a.rows \&\& first < step; first += step/

# file: cross_entropy.cuh - the sum over all rows has what its blocks load first, and no more
# case: forward f32 auto: reduced
s/first < whole; first += step/first < whole \&\& first < step; first += step/

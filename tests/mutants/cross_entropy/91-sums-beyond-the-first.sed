# file: cross_entropy.cuh - the last block adds up what its threads load first, and no more
s/first < to.parts; first += 4 \* threads/first < to.parts \&\& first < 4 * threads; first += 4 * threads/

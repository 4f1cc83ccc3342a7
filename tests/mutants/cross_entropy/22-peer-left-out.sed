# file: cross_entropy.cuh - the states of the last block of a cluster are left out
s/for (int i = rank; i < states; i += 32)/for (int i = rank; i < (states > 8 ? states - 8 : states); i += 32)/

# file: cross_entropy.cuh - the sum over all rows leaves out the last block of its cluster
s/for (int i = rank; i < threads \/ 32; i += 32)/for (int i = rank; i < (threads > THREADS ? threads - THREADS : threads) \/ 32; i += 32)/

# file: logsumexp.cuh - the column path leaves out the last halving
s/half >= N \* p.width; half \/= 2/half > N * p.width; half \/= 2/

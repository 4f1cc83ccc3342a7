# file: logsumexp.cuh - the column path leaves out the last halving
# case: forward f32 column: lengths
s/half >= N \* p.width; half \/= 2/half > N * p.width; half \/= 2/

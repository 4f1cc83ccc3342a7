# file: logsumexp.cuh - the column path leaves out the last block of its cluster
# case: forward f32 column: lengths
s/for (int peer = 1; peer < blocks; peer++)/for (int peer = 1; peer + 1 < blocks; peer++)/

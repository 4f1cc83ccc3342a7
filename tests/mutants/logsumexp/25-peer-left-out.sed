# file: logsumexp.cuh - the column path leaves out the last block of its cluster
s/for (int peer = 1; peer < blocks; peer++)/for (int peer = 1; peer + 1 < blocks; peer++)/

# file: logsumexp.cuh - backward's pieces of a row are longer than what a team's threads take
# case: backward bf16 block: lengths
s/U = narrow ? 4 : 2;/U = 4;/

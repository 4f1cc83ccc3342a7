# file: cross_entropy.cuh - short rows: the target counts among the others
s/^        if (u != seat) continue;/        continue;/

# file: cross_entropy.cuh - short rows: the target counts among the others
# case: backward f16: the target's gradient
s/^        if (u != seat) continue;/        continue;/

# file: lk_base.cuh - the lanes of a team keep references of their own, yet only add
# case: lk_lse: two slices
s/        if (offset >= team) continue;/        continue;/

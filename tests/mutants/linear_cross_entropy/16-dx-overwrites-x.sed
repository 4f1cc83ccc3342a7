# file: linear_cross_entropy.cuh - dx is written over the copy of x before dweight reads it
# case: switches alone backward auto
/lk_lce_run_chunk(lk_lce_run/,/^}/{/before dx, which may/{h;d};/lk_lce_dx<T>/G}

# file: lk_block.cuh - a lane adds the first of its words alone
# case: forward f32 auto: vocabulary
s/k < MOST; k++) s.sum +=/k < 1; k++) s.sum +=/

# file: cross_entropy.cuh - short rows: the upper half of an int64 target is not looked at
# case: backward f32 auto: short rows
/^    if (row < a.rows && wide) word.high/d

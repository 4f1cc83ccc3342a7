# file: lk_base.cuh - what lse was rounded by is 0
# case: forward f32 auto: offsets
s/        \*rounded = (high - (result - added)) + (rest - added);/        *rounded = 0.0f * added;/

# file: cross_entropy.cuh - padding of short rows is not zeroed
# case: backward bf16 auto: places
s/ && plain && !padded &&$/ \&\& plain \&\&/

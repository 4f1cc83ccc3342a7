# file: cross_entropy.cuh - padding of short rows is not zeroed
s/ && plain && !padded &&$/ \&\& plain \&\&/

# file: linear_cross_entropy.cuh - dx of ignored tokens is left as it was
# case: switches alone backward auto
s/label.bad || over || (compact \&\& !label.counted));/label.bad || over);/

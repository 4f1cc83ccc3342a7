# file: lk_base.cuh - code that lacks what lk needs is launched
# case: code of older architectures
s/code.ptxVersion < 80/code.ptxVersion < 70/

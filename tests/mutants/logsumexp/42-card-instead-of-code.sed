# file: lk_base.cuh - the launchers rely on what the card could do, not on what the code has
# case: code of other architectures
s/lk_code_known = {id, code.ptxVersion}/lk_code_known = {id, code.binaryVersion}/

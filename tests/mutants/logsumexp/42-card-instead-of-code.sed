# file: lk_base.cuh - the launchers rely on what the card could do, not on what the code has
# case: code of other architectures
s/const int arch = code\.ptxVersion;/const int arch = code.binaryVersion;/

# file: linear_cross_entropy.cuh - dx of bad tokens is left as it was where nothing else of tokens is open
# case: switches alone backward auto
s/ || counts\.bad || over || compact; .. something/ || over || compact; \/\* something/

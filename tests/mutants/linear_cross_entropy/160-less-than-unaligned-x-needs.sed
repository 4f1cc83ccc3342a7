# file: linear_cross_entropy.cuh - a query without x answers what is too little where x is not aligned
# case: queries from shapes alone
s/ || (c->open \&\& !a.path)//

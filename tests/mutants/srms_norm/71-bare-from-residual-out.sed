# file: srms_norm.cuh - few rows whose s comes from residual alone are taken for bare ones
# case: backward bf16 auto: few rows
s/const bool bare = p\.p\.x\.rows && /const bool bare = /
s/p\.a\.dx && !p\.p\.r\.rows && /p.a.dx \&\& /

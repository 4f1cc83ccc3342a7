# file: srms_norm.cuh - few rows of which dresidual is wanted are taken for bare ones
# case: backward bf16 auto: few rows
s/!p\.p\.dr\.rows && !p\.a\.dresidual && /!p.p.dr.rows \&\& /

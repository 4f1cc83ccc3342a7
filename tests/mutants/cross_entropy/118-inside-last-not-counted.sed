# file: cross_entropy.cuh - counted inside: of one row more than are counted so
# case: forward_backward bf16 auto: counted inside
s/a.rows <= LK_CROSS_ENTROPY_INSIDE \&\&/a.rows <= LK_CROSS_ENTROPY_INSIDE + 1 \&\&/

# file: cross_entropy.cuh - counted inside: of one row more than are counted so
s/a.rows <= LK_CROSS_ENTROPY_INSIDE \&\&/a.rows <= LK_CROSS_ENTROPY_INSIDE + 1 \&\&/

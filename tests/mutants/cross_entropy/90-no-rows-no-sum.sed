# file: cross_entropy.cuh - without rows a reduced loss is not written
s/if (!status && reduced) status = lk_cross_entropy_sum/if (!status \&\& reduced \&\& a.rows > 0) status = lk_cross_entropy_sum/

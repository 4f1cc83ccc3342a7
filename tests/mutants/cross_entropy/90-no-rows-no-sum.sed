# file: cross_entropy.cuh - without rows a reduced loss is not written
# case: forward f32 auto: empty
s/if (!status && reduced) status = lk_cross_entropy_sum/if (!status \&\& reduced \&\& a.rows > 0) status = lk_cross_entropy_sum/

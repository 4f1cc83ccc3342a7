# file: cross_entropy.cuh - without rows a reduced loss is not written
s/if (!status \&\& (plan.to.tally || (a.rows > 0/if (!status \&\& a.rows > 0 \&\& (plan.to.tally || (a.rows > 0/

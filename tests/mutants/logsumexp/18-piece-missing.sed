# file: logsumexp.cuh - backward starts one piece too few of a row that does not fill its last
# case: backward f32 auto: vocabulary
s/plan.pieces = lk_ceil_div(vecs, plan.team \* U);/plan.pieces = vecs > plan.team * U ? vecs \/ (plan.team * U) : 1;/

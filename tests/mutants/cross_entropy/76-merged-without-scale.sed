# file: cross_entropy.cuh - the states of a plain row's warps are merged as if logit_scale were 1
# case: forward, then backward f32
s/lk_lse_cluster(inbox, s, a.logit_scale)/lk_lse_cluster(inbox, s)/

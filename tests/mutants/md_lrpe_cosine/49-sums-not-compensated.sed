# file: md_lrpe_cosine.cuh - what an addition of dtheta's sums rounds off is forgotten
# case: dtheta's compensation over tokens
/void lk_lrpe_add(float \*sum/,/^}/ s/    term -= \*lost;/    term += 0.0f * *lost;/

# file: md_lrpe_cosine.cuh - a thread's terms of dtheta are added without compensation
# case: dtheta's compensation over tokens
/void lk_lrpe_add_dtheta(/,/^}/ s/        lk_lrpe_add(&sums->of\[j\], &sums->lost\[j\],/        sums->of[j] += (/

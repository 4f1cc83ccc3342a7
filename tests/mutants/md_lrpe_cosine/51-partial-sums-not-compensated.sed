# file: md_lrpe_cosine.cuh - partial sums are added without compensation
# case: dtheta's compensation over partial sums
s/lk_lrpe_add(&sum, &lost, p\.partial\(.*\));/sum += p.partial\1;/

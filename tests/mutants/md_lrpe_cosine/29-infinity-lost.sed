# file: md_lrpe_cosine.cuh - an infinite sum of dtheta becomes NaN
# case: backward f32 auto: outputs
s/lk_is_finite(grown) ? (grown - \*sum) - term : 0.0f;/(grown - *sum) - term;/

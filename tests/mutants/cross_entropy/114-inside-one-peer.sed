# file: cross_entropy.cuh - counted inside: a block has the words of its first peers only
# case: forward_backward f32 auto: counted inside
/^    lk_cross_entropy_short_kernel(/,/^}/ s/ + (unsigned)mail->word\[lane + 32\])/)/

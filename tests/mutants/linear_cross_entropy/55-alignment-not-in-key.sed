# file: linear_cross_entropy.cuh - an algorithm for aligned tensors is used for others
# case: forward, backward and forward_backward f32
s/^    while (at < c->count \&\& memcmp(.*/    while (at < c->count \&\& memcmp(\&c->choices[at].key.m, \&m->key.m, sizeof m->key - offsetof(lk_lce_key, m))) at++;/

# file: logsumexp.cuh - backward loads a thread's vectors a thread apart, and stores them a team apart
# case: backward bf16 block: lengths
s/lk_load_vec_ca(vec);/lk_load_vec_ca(vec - u * (p.team - 1) * LK_VEC<T>);/

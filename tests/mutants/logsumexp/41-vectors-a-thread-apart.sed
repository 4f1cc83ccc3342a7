# file: logsumexp.cuh - backward loads a thread's vectors a thread apart, and stores them a team apart
# case: backward bf16 block: lengths
s/else raw\[u\]\.raw = __ldca((const uint4 \*)(from + (first + u \* p\.team) \* LK_VEC<T>));/else raw[u].raw = __ldca((const uint4 *)(from + (first + u) * LK_VEC<T>));/

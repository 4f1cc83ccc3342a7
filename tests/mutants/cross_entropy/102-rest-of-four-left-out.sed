# file: cross_entropy.cuh - a reduced loss leaves out the rows behind the last group of four
# case: forward, then backward f32
s/if (!rest) return sum;/if (!rest || rows > 3) return sum;/

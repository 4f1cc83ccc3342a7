# file: lk_block.cuh - rank 0 takes its inbox for full when the words of one block are missing
s/(unsigned)blocks \* WARPS \* 8/(unsigned)(blocks - 1) * WARPS * 8/

# file: lk_block.cuh - rank 0 takes its inbox for full when the words of one block are missing
s/&inbox->full, blocks \*/\&inbox->full, (blocks - 1) */

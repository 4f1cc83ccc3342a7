# file: lk_block.cuh - the next row's sums go where this row's are still read
# case: backward f16 auto: lengths
s/inbox + (turn & 1) \* HALF/inbox + 0 * turn/

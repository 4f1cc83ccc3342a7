# file: lk_block.cuh - the next row's sums go where this row's are still read
s/inbox + (turn & 1) \* HALF/inbox + 0 * turn/

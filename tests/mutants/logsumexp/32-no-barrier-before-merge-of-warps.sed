# file: lk_block.cuh - the first warp merges states that the others have yet to write
s/__syncthreads(); .* orders the writes into the inbox .*/;/

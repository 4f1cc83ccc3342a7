# file: lk_block.cuh - the first warp merges states that the others have yet to write
# case: forward f32 block: empty
s/__syncthreads(); .* orders the writes into the inbox .*/;/

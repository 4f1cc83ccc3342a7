# file: lk_base.cuh - 48 KiB without asking, beside which static shared memory is forgotten
# case: 12 KiB of static
s/if (smem > 32 \* 1024)/if (smem > 48 * 1024)/

# file: linear_cross_entropy.cuh - a query without a device clears an error that was there before
# case: plans where fused is left out
s/if (clean \&\& cudaPeekAtLastError/if (cudaPeekAtLastError/

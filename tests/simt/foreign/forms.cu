// SPDX-License-Identifier: MIT
// The forms of shared memory and of launches that `rewrite` knows, and PTX that it need not know.
#include <cuda_runtime.h>
#include <stdio.h>

struct Pair {
    float a, b;
};
__device__ unsigned lane()
{
#ifdef LK_SIMT
    return threadIdx.x % 32;
#else
    unsigned lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
#endif
}
#ifndef LK_SIMT
__device__ void pause_all() { asm volatile("nanosleep.u32 20;"); }
#endif
template <class T, int N> __global__ void forms(T *out, int bytes_of_raw)
{
    __shared__ __align__(16) unsigned char bytes[64];
    __shared__ unsigned int counts[N], total;
    __shared__ Pair pairs[2][3];
    __shared__ float *pointer;
    extern __shared__ char raw[];
    const char *text = "forms<<<1, 1>>>(text)"; // forms<<<1, 1>>>(comment)
    if (threadIdx.x == 0) {
        total = 3, pointer = (float *)bytes, pairs[1][2].b = 4, counts[N - 1] = 5, bytes[63] = 6, raw[bytes_of_raw - 1] = 7;
    }
    __syncthreads();
    if (lane() == 1) {
        *out = total + pairs[1][2].b + counts[N - 1] + bytes[63] + raw[bytes_of_raw - 1] + (pointer == (float *)bytes);
        *out += 100 * (text[5] == '<') + 1000 * ((size_t)bytes % 16 == 0);
    }
}
__global__ void nothing()
{
}
int main()
{
    int *found, out = 0, n = 8;
    cudaStream_t stream = 0;
    cudaMalloc(&found, sizeof(int));
    forms<int, (4)><<<dim3(1, (1)), n * 4, (size_t)n, stream>>>(found,
                                                                (n + (1 * (2 - 2))));
    nothing<<<1, 1>>>();
    if (cudaGetLastError() != cudaSuccess) return 1;
    cudaMemcpy(&out, found, sizeof(int), cudaMemcpyDeviceToHost);
    cudaFree(found);
    printf("%d\n", out);
    return out != 1126;
}

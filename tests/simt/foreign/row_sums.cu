// SPDX-License-Identifier: MIT
// A program that knows nothing of lk or of the simulator, as a first lesson in shared memory has it: sums of the rows of a
// matrix, and its transpose. `rewrite` makes it run on the CPU; nvcc compiles it as it is.
// -DRACE leaves out a barrier: the sums of half the threads are read before they are written.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                              \
    do {                                                                         \
        cudaError_t error = (call);                                              \
        if (error != cudaSuccess) {                                              \
            printf("%s: %s\n", #call, cudaGetErrorString(error));                \
            exit(1);                                                             \
        }                                                                        \
    } while (0)

const int ROWS = 50, COLS = 300, TILE = 32;

// One block per row. Each thread adds up some columns; then half of the threads add the sums of the other half, and so on.
template <int THREADS> __global__ void rowSums(const float *in, float *out, int cols)
{
    extern __shared__ float partial[];
    float sum = 0.0f;
    for (int col = threadIdx.x; col < cols; col += THREADS) sum += in[blockIdx.x * cols + col];
    partial[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
#ifndef RACE
        __syncthreads();
#endif
        if ((int)threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
}

__global__ void transpose(const float *in, float *out, int rows, int cols)
{
    __shared__ float tile[TILE][TILE + 1];
    int col = blockIdx.x * TILE + threadIdx.x, row = blockIdx.y * TILE;
    for (int y = threadIdx.y; y < TILE; y += blockDim.y)
        if (row + y < rows && col < cols) tile[y][threadIdx.x] = in[(row + y) * cols + col];
    __syncthreads();
    int x = blockIdx.y * TILE + threadIdx.x;
    for (int y = threadIdx.y; y < TILE; y += blockDim.y)
        if (x < rows && (int)blockIdx.x * TILE + y < cols) out[(blockIdx.x * TILE + y) * rows + x] = tile[threadIdx.x][y];
}

int main()
{
    std::vector<float> in(ROWS * COLS), sums(ROWS), turned(ROWS * COLS);
    for (int i = 0; i < ROWS * COLS; i++) in[i] = (float)(i * 7 % 11);
    float *d_in, *d_sums, *d_turned;
    CHECK(cudaMalloc(&d_in, in.size() * sizeof(float)));
    CHECK(cudaMalloc(&d_turned, in.size() * sizeof(float)));
    CHECK(cudaMalloc(&d_sums, ROWS * sizeof(float)));
    CHECK(cudaMemcpy(d_in, in.data(), in.size() * sizeof(float), cudaMemcpyHostToDevice));

    const int threads = 128;
    rowSums<threads><<<ROWS, threads, threads * sizeof(float)>>>(d_in, d_sums, COLS);
    CHECK(cudaGetLastError());
    dim3 grid((COLS + TILE - 1) / TILE, (ROWS + TILE - 1) / TILE);
    transpose<<<grid, dim3(TILE, 8)>>>(d_in, d_turned,
                                       ROWS, COLS);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(sums.data(), d_sums, ROWS * sizeof(float), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(turned.data(), d_turned, in.size() * sizeof(float), cudaMemcpyDeviceToHost));

    int wrong = 0;
    for (int row = 0; row < ROWS; row++) {
        float sum = 0.0f;
        for (int col = 0; col < COLS; col++) {
            sum += in[row * COLS + col];
            wrong += turned[col * ROWS + row] != in[row * COLS + col];
        }
        wrong += sums[row] != sum;
    }
    for (float *p : {d_in, d_sums, d_turned}) CHECK(cudaFree(p));
    printf(wrong ? "%d numbers are wrong\n" : "all numbers are right\n", wrong);
    return wrong > 0;
}

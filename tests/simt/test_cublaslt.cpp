// SPDX-License-Identifier: MIT
// The simulator's cublasLt.h against sums in double: types, transposes, leading dimensions, alpha and beta, bias, scalars in device memory,
// capture, and what it must refuse.
#include "cublasLt.h"

#include <math.h>
#include <stdio.h>

static int passed, failed;

static void verdict(bool ok, const char *name) {
    printf("%-5s %s\n", ok ? "ok" : "FAIL", name);
    ok ? passed++ : failed++;
}

enum { MOST = 4096 };
static cublasLtHandle_t handle;
static char *memory[4]; // of A, B, D, the workspace
static float *scalars, *bias;

static float number(int i) { return (float)((i * 37 + 11) % 29 - 14) / 8.0f; } // exact in every type, and so are short sums

struct shape {
    cudaDataType type, out;
    int transpose_a, transpose_b, m, n, k, pad;
    float alpha, beta;
    int bias, device, offset; // offset: elements that A is past its alignment
};

/* Fills, multiplies, and returns the status; *error is the largest difference from the sums in double. */
static cublasStatus_t multiply(const shape &s, uint32_t alignment, cudaStream_t stream, double *error) {
    const uint64_t rows_a = s.transpose_a ? s.k : s.m, cols_a = s.transpose_a ? s.m : s.k, rows_b = s.transpose_b ? s.n : s.k, cols_b = s.transpose_b ? s.k : s.n;
    const int64_t lda = rows_a + s.pad, ldb = rows_b + s.pad, ldd = s.m + s.pad;
    void *const a = memory[0] + s.offset * simt_cublaslt_bytes(s.type);
    for (int i = 0; i < MOST / 4; i++) {
        if (i < lda * (int64_t)cols_a) simt_cublaslt_put(a, s.type, i, number(i));
        if (i < ldb * (int64_t)cols_b) simt_cublaslt_put(memory[1], s.type, i, number(i + 5));
        if (i < ldd * s.n) simt_cublaslt_put(memory[2], s.out, i, s.beta != 0 ? number(i + 9) : NAN);
        if (i < s.m) simt_cublaslt_put(bias, s.out, i, i == 1 ? -INFINITY : number(i + 3));
    }
    scalars[0] = s.alpha, scalars[1] = s.beta;
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t la, lb, ld;
    cublasLtMatmulPreferenceOpaque_t preference;
    const int32_t mode = s.device ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST;
    const uint32_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const void *const at_bias = bias;
    const uint64_t workspace = MOST;
    cublasLtMatmulDescInit(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(&desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof mode);
    cublasLtMatmulDescSetAttribute(&desc, CUBLASLT_MATMUL_DESC_TRANSA, &s.transpose_a, 4);
    cublasLtMatmulDescSetAttribute(&desc, CUBLASLT_MATMUL_DESC_TRANSB, &s.transpose_b, 4);
    if (s.bias) cublasLtMatmulDescSetAttribute(&desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    if (s.bias) cublasLtMatmulDescSetAttribute(&desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at_bias, sizeof at_bias);
    cublasLtMatrixLayoutInit(&la, s.type, rows_a, cols_a, lda), cublasLtMatrixLayoutInit(&lb, s.type, rows_b, cols_b, ldb);
    cublasLtMatrixLayoutInit(&ld, s.out, s.m, s.n, ldd);
    cublasLtMatmulPreferenceInit(&preference);
    cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &alignment, sizeof alignment);
    cublasLtMatmulHeuristicResult_t found[8];
    int count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, &desc, &la, &lb, &ld, &ld, &preference, 8, found, &count);
    if (status) return status;
    const void *const alpha = s.device ? scalars : &s.alpha, *const beta = s.device ? scalars + 1 : &s.beta;
    status = cublasLtMatmul(handle, &desc, alpha, a, &la, memory[1], &lb, beta, memory[2], &ld, memory[2], &ld, &found[count - 1].algo, memory[3], MOST, stream);
    *error = 0;
    for (int i = 0; i < s.m && !status; i++)
        for (int j = 0; j < s.n; j++) {
            double want = 0;
            for (int k = 0; k < s.k; k++)
                want += (double)number(s.transpose_a ? i * lda + k : k * lda + i) * number((s.transpose_b ? k * ldb + j : j * ldb + k) + 5);
            want = s.alpha * want + (s.beta != 0 ? s.beta * number(j * ldd + i + 9) : 0) + (s.bias && i != 1 ? number(i + 3) : 0);
            const double got = simt_cublaslt_get(memory[2], s.out, j * ldd + i);
            const double off = s.bias && i == 1 ? (got == -INFINITY ? 0 : 1) : fabs(got - want) / (1 + fabs(want));
            *error = off <= *error ? *error : off; // a NaN stays
        }
    return status;
}

int main(void) {
    for (char *&piece : memory) cudaMalloc(&piece, MOST);
    cudaMalloc(&scalars, 8), cudaMalloc(&bias, 4 * 64);
    verdict(cublasLtCreate(&handle) == CUBLAS_STATUS_SUCCESS, "a handle");
    const cudaDataType types[] = {CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF};
    bool right = true;
    for (int i = 0; i < 3 * 256; i++) {
        const cudaDataType type = types[i % 3];
        const shape s = {type, i & 1 ? type : CUDA_R_32F, i >> 1 & 1, i >> 2 & 1, 1 + i % 13, 1 + i % 21, 1 + i % 7, i >> 3 & 3, 0.5f, i >> 4 & 1 ? 1.0f : 0.0f,
                         i >> 5 & 1, i >> 6 & 1, i >> 7 & 1};
        double error;
        const cublasStatus_t status = multiply(s, simt_cublaslt_bytes(type), 0, &error);
        const double limit = s.out == CUDA_R_32F ? 1e-6 : s.out == CUDA_R_16F ? 0x1p-11 : 0x1p-8;
        if (status || !(error <= limit)) right = false, printf("case %d: status %d, error %g\n", i, status, error);
    }
    verdict(right, "products of every type and transpose, with beta, bias, pads, offsets and scalars in device memory");

    double error;
    shape s = {CUDA_R_16BF, CUDA_R_32F, 0, 0, 8, 8, 8, 0, 1, 0, 0, 0, 1};
    verdict(multiply(s, 4, 0, &error) == CUBLAS_STATUS_INVALID_VALUE, "refused: a pointer less aligned than the heuristic was told");
    s.offset = 0, s.n = 300;
    verdict(multiply(s, 4, 0, &error) == CUBLAS_STATUS_INVALID_VALUE, "refused: a matrix that leaves its allocation");
    s.n = 8;
    simt_cublaslt_refuse(0);
    verdict(multiply(s, 4, 0, &error) == CUBLAS_STATUS_NOT_SUPPORTED, "refused: what a test asked for");
    simt_cublaslt_refuse(-1);
    memset(memory[3], 0, MOST);
    multiply(s, 4, 0, &error);
    verdict(memory[3][0] == (char)simt_poison_byte() && memory[3][MOST - 1] == (char)simt_poison_byte(), "the workspace is written over");

    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    const bool late = multiply(s, 4, stream, &error) == CUBLAS_STATUS_SUCCESS && !(error <= 1); // D is still NaN
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&replay, graph, 0);
    cudaGraphLaunch(replay, stream);
    verdict(late && ((float *)memory[2])[0] == ((float *)memory[2])[0], "captured, and run by the graph");
    cudaGraphExecDestroy(replay), cudaGraphDestroy(graph), cudaStreamDestroy(stream);

    verdict(cublasLtDestroy(handle) == CUBLAS_STATUS_SUCCESS, "the handle is destroyed");
    for (char *piece : memory) cudaFree(piece);
    cudaFree(scalars), cudaFree(bias);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}

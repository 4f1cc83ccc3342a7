// SPDX-License-Identifier: MIT
/* Runs logsumexp forward and backward of the lk that the including .cu file has: 300 rows of 70, of which each value is
 * log(row + 1), so that lse is log(70 (row + 1)) and, dlse being NULL, each gradient 1 / 70. */
static int runs(void)
{
    enum { ROWS = 300, COLS = 70 };
    static float x[ROWS * COLS], dx[ROWS * COLS], lse[ROWS];
    for (int i = 0; i < ROWS * COLS; i++) x[i] = logf((float)(i / COLS + 1));
    void *memory = NULL;
    if (cudaMalloc(&memory, 2 * sizeof x + sizeof lse)) return 0;
    float *const x_device = (float *)memory, *const dx_device = x_device + ROWS * COLS, *const lse_device = dx_device + ROWS * COLS;
    lk_logsumexp_args args = {};
    args.x = x_device, args.lse = lse_device, args.dx = dx_device, args.outer = ROWS, args.cols = COLS;
    int good = !cudaMemcpy(x_device, x, sizeof x, cudaMemcpyHostToDevice) && !lk_logsumexp_forward_f32(&args, NULL) &&
               !lk_logsumexp_backward_f32(&args, NULL) && !cudaMemcpy(lse, lse_device, sizeof lse, cudaMemcpyDeviceToHost) &&
               !cudaMemcpy(dx, dx_device, sizeof dx, cudaMemcpyDeviceToHost);
    /* lse is below 16: 8 units of its last place, 2^-21 each, in it, and as much, relatively, in a gradient made from it */
    for (int i = 0; i < ROWS; i++) good = good && fabs(lse[i] - log(COLS * (i + 1.0))) <= 8 * 0x1p-21;
    for (int i = 0; i < ROWS * COLS; i++) good = good && fabs(dx[i] * COLS - 1.0) <= 16 * 0x1p-21;
    cudaFree(memory);
    return good;
}

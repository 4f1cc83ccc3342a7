// SPDX-License-Identifier: MIT
/* lk_move.cuh - copies of rows between two types: rounded, chosen by a list of rows, scaled, or added to what is there.
 *
 *   to[to_row[r], c] = scale[r] from[from_row[r], c] + (add ? to[to_row[r], c] : 0)          c < cols
 *
 * The heads use it for x of tokens that count, for sums that lie in float and are wanted in 16 bits, and for a bias in the type
 * of the logits.
 *
 * Needs: lk_base.cuh, lk_ptx.cuh.
 */
#ifndef LK_MOVE_CUH
#define LK_MOVE_CUH

#include "lk_base.cuh"

#if defined(__CUDACC__) || defined(LK_SIMT)

typedef struct {
    const void *from;
    void *to;
    const int32_t *from_row, *to_row; /* the number of each row; NULL: its own. -1: read as zeros; not written */
    int64_t rows, cols, from_stride, to_stride;
    int add;            /* not 0: added to what is there */
    const float *scale; /* of each row; 0 gives zeros even from NaN; NULL: 1 */
} lk_move;

#define LK_MOVE_THREADS 256
#define LK_MOVE_TILE (8 * LK_MOVE_THREADS)

/* A block has several short rows, and a row of more than LK_MOVE_TILE columns several blocks. 1 << log2 threads of a block have
 * 8 neighbours each of a row of `cols` columns. */
LK_HOST int64_t lk_move_blocks(int64_t rows, int64_t cols)
{
    int log2 = 0;
    while (8 << log2 < LK_MOVE_TILE && 8 << log2 < cols) log2++;
    return lk_ceil_div(rows, LK_MOVE_THREADS >> log2) * lk_ceil_div(cols, LK_MOVE_TILE);
}

/* A thread's row, which may be behind the last one, and its first column. */
typedef struct {
    int64_t row, col;
} lk_move_place;
LK_DEVICE lk_move_place lk_move_place_of(int64_t cols)
{
    const int thread = (int)threadIdx.x;
    if (cols > LK_MOVE_TILE) {
        const int64_t tiles = (cols + LK_MOVE_TILE - 1) / LK_MOVE_TILE;
        return {blockIdx.x / tiles, blockIdx.x % tiles * LK_MOVE_TILE + thread * 8};
    }
    const int log2 = 32 - __clz(((int)cols + 7) / 8 - 1);
    return {((int64_t)blockIdx.x * LK_MOVE_THREADS + thread) >> log2, (thread & ((1 << log2) - 1)) * 8};
}

/* Eight neighbours of a row, or the `left` first of them. wide: all eight are there, at a multiple of 16 bytes. */
template <class T> LK_DEVICE void lk_move_load(float (&x)[8], const T *from, int64_t left, bool wide)
{
    constexpr int Num = LK_VEC<T>;
    LK_UNROLL for (int at = 0; at < 8; at += Num) {
        float some[Num] = {};
        if (wide) lk_unpack(some, lk_load_vec(from + at));
        LK_UNROLL
        for (int i = 0; i < Num; i++) x[at + i] = wide || at + i >= left ? some[i] : lk_to_float(from[at + i]);
    }
}
template <class T> LK_DEVICE void lk_move_store(T *to, const float (&x)[8], int64_t left, bool wide)
{
    constexpr int Num = LK_VEC<T>;
    LK_UNROLL for (int at = 0; at < 8; at += Num) {
        float some[Num];
        LK_UNROLL for (int i = 0; i < Num; i++) {
            some[i] = x[at + i];
            if (!wide && at + i < left) lk_put(to + at + i, some[i]);
        }
        if (wide) lk_store_n(to + at, some);
    }
}

template <class In, class Out> LK_KERNEL void __launch_bounds__(LK_MOVE_THREADS) lk_move_kernel(lk_move p)
{
    const lk_move_place at = lk_move_place_of(p.cols);
    const int64_t row = at.row, left = p.cols - at.col;
    lk_griddepcontrol_wait();
    if (row >= p.rows || left <= 0) return;
    const float scale = p.scale ? p.scale[row] : 1.0f;
    const int64_t from_row = scale == 0.0f ? -1 : p.from_row ? p.from_row[row] : row, to_row = p.to_row ? p.to_row[row] : row;
    if (to_row < 0) return;
    const In *from = (const In *)p.from + (from_row < 0 ? 0 : from_row) * p.from_stride + at.col;
    Out *to = (Out *)p.to + to_row * p.to_stride + at.col;
    const bool wide = left >= 8 && ((uintptr_t)from | (uintptr_t)to) % 16 == 0;
    float x[8] = {}, old[8] = {};
    if (from_row >= 0) lk_move_load(x, from, left, wide);
    if (p.add) lk_move_load(old, to, left, wide);
    LK_UNROLL for (int i = 0; i < 8; i++) x[i] = fmaf(scale, x[i], old[i]);
    lk_move_store(to, x, left, wide);
}

template <class In, class Out>
LK_HOST lk_status lk_move_rows(const char *op, const lk_device *device, const lk_move &move, cudaStream_t stream)
{
    return lk_launch_pdl(op, device, lk_move_kernel<In, Out>, lk_move_blocks(move.rows, move.cols), 1, LK_MOVE_THREADS, 0, stream,
                         move);
}

#endif /* CUDA or the simulator */
#endif

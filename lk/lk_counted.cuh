// SPDX-License-Identifier: MIT
/* lk_counted.cuh - a call on the tokens that count alone: max_counted of linear_kl.cuh and linear_cross_entropy_ids.cuh.
 *
 * Each token has a flag: it counts, or not. Tokens that count become rows 0, 1, 2, ... in their order. What the call reads of each
 * token is copied into rows of the workspace. The call runs on these rows, as if there were no other tokens. Its results are copied
 * back. Tokens that do not count get 0, and -1 for argmax.
 *   lk_counted_list_kernel    one block: finds the token of each row, and the row of each token
 *   lk_counted_copy_kernel    copies tensors of a few numbers per token, before the call and after it. If more tokens count than
 *                             there are rows, it writes NaN to floats of each token, and -1 to argmax
 *   lk_move_kernel            copies x before the call, and dx after it
 *   lk_counted_spoil_kernel   fills gradients and reduced losses with NaN then
 * The caller says how many rows there are. Rows without a token come behind the others; the call must take them as ignored.
 *
 * Needs: lk_base.cuh, lk_move.cuh, lk_ptx.cuh.
 */
#ifndef LK_COUNTED_CUH
#define LK_COUNTED_CUH

#include "lk_move.cuh"

#if LK_CUDA

/* A tensor of some words of 4 bytes per row. */
typedef struct {
    const void *from; /* NULL: each row that has a source reads `one` */
    void *to;
    int64_t from_stride, to_stride; /* in words */
    int64_t words;
    unsigned one, none; /* none: of a row without a source */
    unsigned spoiled;   /* of all rows, if `spoils` and too many tokens count */
    bool spoils, add;   /* add: of floats, to what is there */
} lk_counted_tensor;

#define LK_COUNTED_TENSORS 16 /* a call has at most 13 */
#define LK_COUNTED_ONE 0x3f800000u /* 1.0f */
#define LK_COUNTED_NAN 0x7fffffffu

/* Tensors that have the same rows. */
typedef struct {
    lk_counted_tensor list[LK_COUNTED_TENSORS];
    int number;
    int64_t rows;          /* of each tensor in `to` */
    const int32_t *source; /* [rows]: the row of `from`; -1: none */
    const int64_t *count;  /* [1] */
    int64_t most;          /* more than so many are too many */
    int64_t *valid_rows;   /* gets *count; NULL: nobody wants it */
} lk_counted_copies;

/* Which tokens are rows. */
typedef struct {
    int64_t tokens, rows;
    const unsigned *flag; /* [tokens]: the token counts unless this is 0 or -0.0f */
    int32_t *token;       /* [rows]: the token of a row; -1: none */
    int32_t *row;         /* [tokens]: the row of a token; -1: none */
    int64_t *count;       /* [1]: how many tokens count */
} lk_counted_list;

/* Tensors that become NaN if too many tokens count: elements of 2 or 4 bytes. cols 0: there is none. */
typedef struct {
    struct {
        void *to;
        int64_t rows, cols, stride;
        int bytes;
    } list[5]; /* at most a loss, a z-loss, dx, dweight and dbias */
    int number;
    const int64_t *count;
    int64_t most;
} lk_counted_spoils;

typedef struct {
    lk_counted_list list;
    lk_counted_copies in, out;
    lk_move x[2], dx; /* cols 0: there is none */
    lk_counted_spoils spoils;
} lk_counted;

#define LK_COUNTED_THREADS 256

LK_KERNEL void __launch_bounds__(LK_COUNTED_THREADS) lk_counted_list_kernel(lk_counted_list p)
{
    LK_SHARED(int, warps, [LK_COUNTED_THREADS / 32]);
    const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
    constexpr int Ahead = 8; /* flags that a thread loads before it looks at the first */
    int64_t seen = 0;
    lk_griddepcontrol_wait();
    for (int64_t first = thread; first - thread < p.tokens; first += Ahead * LK_COUNTED_THREADS) {
        unsigned flag[Ahead];
        LK_UNROLL for (int i = 0; i < Ahead; i++) {
            const int64_t token = first + i * LK_COUNTED_THREADS;
            flag[i] = token < p.tokens ? p.flag[token] : 0;
        }
        LK_UNROLL for (int i = 0; i < Ahead; i++) {
            const int64_t token = first + i * LK_COUNTED_THREADS;
            const bool counts = flag[i] << 1;
            const unsigned counted = __ballot_sync(0xffffffffu, counts);
            if (lane == 0) warps[warp] = __popc(counted);
            __syncthreads(); /* orders the counts before their reads */
            int64_t row = seen + __popc(counted & ((1u << lane) - 1));
            for (int w = 0; w < LK_COUNTED_THREADS / 32; w++) row += w < warp ? warps[w] : 0, seen += warps[w];
            __syncthreads(); /* orders the reads before the next counts */
            const bool there = counts && row < p.rows;
            if (token < p.tokens) p.row[token] = there ? (int)row : -1;
            if (there) p.token[row] = (int)token;
        }
    }
    for (int64_t row = seen + thread; row < p.rows; row += LK_COUNTED_THREADS) p.token[row] = -1;
    if (thread == 0) *p.count = seen;
}

#define LK_COUNTED_COPY_THREADS 256

/* A thread per word of all tensors, one tensor after the other. */
LK_KERNEL void __launch_bounds__(LK_COUNTED_COPY_THREADS) lk_counted_copy_kernel(const __grid_constant__ lk_counted_copies p)
{
    int64_t i = (int64_t)blockIdx.x * LK_COUNTED_COPY_THREADS + threadIdx.x;
    int which = 0;
    lk_griddepcontrol_wait();
    if (i == 0 && p.valid_rows) *p.valid_rows = *p.count;
    for (; which < p.number && i >= p.rows * p.list[which].words; which++) i -= p.rows * p.list[which].words;
    if (which == p.number) return;
    const lk_counted_tensor &t = p.list[which];
    const int64_t row = i / t.words, word = i % t.words, source = p.source[row];
    unsigned value = t.none, *const to = (unsigned *)t.to + row * t.to_stride + word;
    if (source >= 0) value = t.from ? ((const unsigned *)t.from)[source * t.from_stride + word] : t.one;
    if (t.spoils && *p.count > p.most) value = t.spoiled;
    *to = t.add ? __float_as_uint(__uint_as_float(*to) + __uint_as_float(value)) : value;
}

LK_KERNEL void __launch_bounds__(LK_COUNTED_COPY_THREADS) lk_counted_spoil_kernel(lk_counted_spoils p)
{
    lk_griddepcontrol_wait();
    if (*p.count <= p.most) return;
    LK_UNROLL for (int k = 0; k < 5; k++) {
        const auto &t = p.list[k];
        const int64_t step = (int64_t)gridDim.x * LK_COUNTED_COPY_THREADS;
        LK_NO_UNROLL for (int64_t i = (int64_t)blockIdx.x * LK_COUNTED_COPY_THREADS + threadIdx.x; i < t.rows * t.cols; i += step) {
            const int64_t at = i / t.cols * t.stride + i % t.cols;
            if (t.bytes == 2) ((uint16_t *)t.to)[at] = 0x7fff; /* a NaN in both types of 16 bits */
            else ((unsigned *)t.to)[at] = LK_COUNTED_NAN;
        }
    }
}

/* ---- What a call copies -------------------------------------------------------------------------------------------------- */

/* Begins the description of a call with `rows` rows; its arrays come from the workspace. flag: of the tokens. */
LK_HOST void lk_counted_begin(lk_counted *c, lk_arena *arena, int64_t tokens, int64_t rows, const void *flag)
{
    lk_counted_list *const list = &c->list;
    *c = {};
    list->tokens = tokens, list->rows = rows, list->flag = (const unsigned *)flag;
    lk_take(&list->token, arena, true, rows);
    lk_take(&list->row, arena, true, tokens);
    lk_take(&list->count, arena, true, 1);
    c->in.rows = rows, c->in.source = list->token, c->in.count = list->count, c->in.most = rows;
    c->out.rows = tokens, c->out.source = list->row, c->out.count = list->count, c->out.most = rows;
    c->spoils.count = list->count, c->spoils.most = rows;
}

/* Replaces an input by an array of the workspace with one row for each token that counts. words, stride: of a token, in words.
 * required: a query counts this array even if *tensor is NULL. */
template <class Elem>
LK_HOST void lk_counted_in(lk_counted *c, lk_arena *arena, Elem **tensor, bool required = false, int64_t words = 1,
                           int64_t stride = 1, unsigned none = 0)
{
    if (!*tensor && !required) return;
    void *const to = lk_take_bytes(arena, true, lk_count(c->list.rows, 4 * words));
    c->in.list[c->in.number++] = {*tensor, to, stride, words, words, 0, none, 0, false, false};
    *tensor = (Elem *)to;
}

/* As lk_counted_in, for a factor: 1 if *tensor is NULL, and 0 in rows without a token. Afterwards *tensor is not NULL. */
LK_HOST void lk_counted_in_factor(lk_counted *c, lk_arena *arena, const float **tensor, int64_t words, int64_t stride)
{
    float *to;
    lk_take(&to, arena, true, lk_count(c->list.rows, words));
    c->in.list[c->in.number++] = {*tensor, to, stride, words, words, LK_COUNTED_ONE, 0, 0, false, false};
    *tensor = to;
}

/* As lk_counted_in, for an output. Tokens that do not count get `none`. If too many count, floats get NaN, and others `none`. */
template <class Elem>
LK_HOST void lk_counted_out(lk_counted *c, lk_arena *arena, Elem **tensor, bool floats, unsigned none = 0,
                            int64_t words = sizeof(Elem) / 4, int64_t stride = sizeof(Elem) / 4, bool add = false)
{
    if (!*tensor) return;
    void *const from = lk_take_bytes(arena, true, lk_count(c->list.rows, 4 * words));
    c->out.list[c->out.number++] = {from, *tensor, words, stride, words, 0, none, floats ? LK_COUNTED_NAN : none, true, add};
    *tensor = (Elem *)from;
}

template <class T> LK_HOST void *lk_counted_array(const lk_counted *c, lk_arena *arena, int64_t cols)
{
    return lk_take_bytes(arena, true, lk_count(c->list.rows, lk_count(lk_ceil_div(cols, 8) * 8, (int64_t)sizeof(T))));
}
/* Replaces x, or dx, by an array of the workspace whose rows begin at multiples of 16 bytes. */
template <class T>
LK_HOST void lk_counted_x(lk_counted *c, lk_arena *arena, const void **x, int64_t cols, int64_t *stride, lk_move *move)
{
    void *const array = lk_counted_array<T>(c, arena, cols);
    *move = {*x, array, c->list.token, NULL, c->list.rows, cols, *stride, lk_ceil_div(cols, 8) * 8, 0, NULL};
    *x = array, *stride = move->to_stride;
}
template <class T> LK_HOST void lk_counted_dx(lk_counted *c, lk_arena *arena, void **dx, int64_t cols, int64_t *stride)
{
    if (!*dx) return;
    void *const array = lk_counted_array<T>(c, arena, cols);
    c->dx = {array, *dx, c->list.row, NULL, c->list.tokens, cols, lk_ceil_div(cols, 8) * 8, *stride, 0, NULL};
    *dx = array, *stride = c->dx.from_stride;
}

/* A tensor, of `bytes` each element, that becomes NaN if too many tokens count. */
LK_HOST void lk_counted_spoil(lk_counted *c, void *tensor, int64_t rows, int64_t cols, int64_t stride, int bytes)
{
    if (tensor) c->spoils.list[c->spoils.number++] = {tensor, rows, cols, stride, bytes};
}

/* ---- Launchers ----------------------------------------------------------------------------------------------------------- */

LK_HOST lk_status lk_counted_copy(const char *op, const lk_device *device, const lk_counted_copies &p, cudaStream_t stream)
{
    int64_t words = p.valid_rows ? 1 : 0;
    for (int i = 0; i < p.number; i++) words += p.rows * p.list[i].words;
    if (words == 0) return LK_OK;
    return lk_launch_pdl(op, device, lk_counted_copy_kernel, lk_ceil_div(words, LK_COUNTED_COPY_THREADS), 1,
                         LK_COUNTED_COPY_THREADS, 0, stream, p);
}

/* Before the call, when `flag` is there. */
template <class T>
LK_HOST lk_status lk_counted_gather(const char *op, const lk_device *device, const lk_counted *c, cudaStream_t stream)
{
    lk_status status = lk_launch_pdl(op, device, lk_counted_list_kernel, 1, 1, LK_COUNTED_THREADS, 0, stream, c->list);
    if (!status) status = lk_counted_copy(op, device, c->in, stream);
    for (int i = 0; i < 2 && !status; i++)
        if (c->x[i].cols) status = lk_move_rows<T, T>(op, device, c->x[i], stream);
    return status;
}

/* After it. */
template <class T>
LK_HOST lk_status lk_counted_scatter(const char *op, const lk_device *device, const lk_counted *c, cudaStream_t stream)
{
    lk_status status = lk_counted_copy(op, device, c->out, stream);
    if (!status && c->dx.cols) status = lk_move_rows<T, T>(op, device, c->dx, stream);
    int64_t largest = 0;
    for (const auto &t : c->spoils.list) largest = t.rows * t.cols > largest ? t.rows * t.cols : largest;
    if (status || !largest) return status;
    const int64_t blocks = lk_ceil_div(largest, LK_COUNTED_COPY_THREADS);
    return lk_launch_pdl(op, device, lk_counted_spoil_kernel, blocks < device->sms ? blocks : device->sms, 1,
                         LK_COUNTED_COPY_THREADS, 0, stream, c->spoils);
}

#endif /* CUDA or the simulator */
#endif

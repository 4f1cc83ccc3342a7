// SPDX-License-Identifier: MIT
/* srms_norm.cuh - root mean square normalisation of rows, with residual stream and weight, forward and backward.
 *
 *   forward    s[r,c] = x[r,c] + residual[r,c]                                           (s = x without a residual)
 *              rstd[r] = 1 / sqrt(mean_c(s[r,c]^2) + eps)
 *              y[r,c] = s[r,c] rstd[r] w[c] + bias[c],  w[c] = weight_offset + weight[c]  (1 without weight)
 *              residual_out[r,c] = s[r,c]
 *   backward   g[r,c] = dy[r,c] w[c],  h[r,c] = s[r,c] rstd[r]
 *              ds[r,c] = rstd[r] (g[r,c] - h[r,c] mean_c(g[r,c] h[r,c])) + dresidual_out[r,c]
 *              dx = ds,  dresidual = ds
 *              dweight[c] = sum_r dy[r,c] h[r,c],  dbias[c] = sum_r dy[r,c]
 *
 *   groups     row r has the weight and bias of its group: for [c] read [r % groups, c], and sum over the group's rows. So the
 *              rows of [tokens, heads, dim] have a weight per head where groups is the number of heads.
 *
 * Without weight this is SRMSNorm (each row gets the length sqrt(cols), except for eps), with weight RMSNorm; with
 * weight_offset = 1 it is Gemma's. With a residual it is the "add and norm" of a transformer block.
 *
 * Use        In one .cu file:                          Anywhere, C included:
 *                #include "lk/srms_norm.cuh"               #include "lk/srms_norm.cuh"
 *                LK_DEFINE_SRMS_NORM(bf16)                 LK_DECLARE_SRMS_NORM(bf16)
 *            T is f32, f16 or bf16. Then, asynchronously on the caller's stream, in a graph too:
 *                lk_srms_norm_args args = {};
 *                args.x = x, args.rstd = rstd, args.y = y, args.rows = rows, args.cols = cols, args.eps = 1e-6f;
 *                lk_status status = lk_srms_norm_forward_bf16(&args, stream);
 *                args.dy = dy, args.dx = dx;
 *                status = lk_srms_norm_backward_bf16(&args, stream);       // reads x and the rstd that forward wrote
 *            With a residual set residual and residual_out too. Backward then reads s from residual_out, and not x.
 * Needs      lk_base.cuh, lk_check.cuh, lk_row.cuh, lk_ptx.cuh. Only dweight and dbias need a workspace: for each of them at most
 *            64 MiB + (8 * cols + 128) bytes, or groups * (8 * cols + 6144) bytes if that is more.
 *            lk_srms_norm_backward_workspace_bytes_<T> answers for the current device: exactly for the tensors in args, or,
 *            where x and residual_out are NULL, the most for any tensors of these sizes, strides and types. Without them it
 *            answers 0 and needs no device.
 * Options    residual, weight, bias, rstd and dresidual_out may be NULL, and any output, but not all. A NULL dy means 1, not 0.
 *            residual(_out) and its gradients may be float beside 16-bit x and y, and so may dy; weight and bias may be of any
 *            type, and so their gradients. accumulate: dweight and dbias are added to their old
 *            contents. Strides of 0 mean packed, so an expanded tensor must be copied first.
 *            round_sum: s is rounded to residual_dtype before it is used, so that rstd and y are those of the stored residual_out,
 *            as where x + residual is an operation of its own. Else they are those of the float sum. A norm of residual_out alone
 *            has the same bits where residual_dtype is T, weight is of T and not of groups, there is no bias, a row has at most
 *            32 KiB, all tensors and their rows lie on 16 bytes, and path and batch_invariant are the same.
 *            batch_invariant: in forward each row's results have the same bits for any number of rows and at any place among
 *            them, if the rows of each tensor lie alike modulo 16 bytes. Kernels are those of many rows then, so few rows may
 *            take longer.
 * Repeatable The same bits every time on the same device, for the same options, sizes, strides and alignment of tensors to 16
 *            bytes: fixed order, no atomics.
 * Source     Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; without weight: Qin et al., "TransNormerLLM",
 *            2023.
 * Read on    lk/srms_norm.md: how exact results are, and what is read and written.
 *
 * The kernels, in the order of the file, and when they run unless `path` says otherwise. A vector is 16 bytes of T.
 *   forward           lk_srms_norm_forward_kernel. Up to 128 vectors (256 where a thread holds 8) 1 to 32 threads have a row;
 *                     longer rows a block of up to 512 threads, with 4 or 8 vectors each; still longer ones a cluster of 2 to 8
 *                     blocks. It is compiled without weight and bias, with ones that the threads hold, and with any. Few rows
 *                     of up to 1024 vectors have a block each, with 2 vectors per thread
 *   forward of short  lk_srms_norm_forward_short_kernel: many rows of at most 32 vectors, of T alone and without bias, as norms
 *   rows              per head have; a team's threads have 2 rows each
 *   backward          lk_srms_norm_backward_kernel. Teams as in forward, blocks of up to 256 threads with weight, dweight or
 *                     dbias, else 512, and 4 vectors per thread in shared memory. With one of these there are as many blocks as
 *                     run at once, and a team has many rows. Where it would have more than 4, with dweight, without dbias and
 *                     with dy of T, a thread has 2 vectors. More threads run at once then, or s and dy stay in registers
 *   backward of few   lk_srms_norm_backward_few_kernel, as in forward
 *   rows, no sums
 *   backward of short lk_srms_norm_backward_short_kernel, as in forward: dy is given, s is one tensor, of the outputs of rows
 *   rows              there is dx alone, and no dbias
 *   dweight, dbias    lk_srms_norm_row_sum_kernel adds up the teams' sums, after the rows
 * For example 4096 rows of 4096 columns in bf16 with a weight, 512 vectors, on an H200: in forward a block of 128 threads has a
 * row, 4 vectors per thread. In backward with dweight 396 blocks of 256 threads have 10 or 11 rows each; then 128 blocks add up
 * their 396 sums of each column. 64 such rows have a block of 256 threads each in forward.
 * How the rows are divided comes before the kernels; the checks of arguments, the workspace and the calls come last.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_SRMS_NORM_CUH
#define LK_SRMS_NORM_CUH

/* The kernel that runs. Every path takes every option, and every shape within the limits under LK_ERR_PATH. */
enum {
    LK_SRMS_NORM_AUTO = 0,
    LK_SRMS_NORM_WARP = 1,   /* a team of 1 to 32 lanes per row, several rows per block */
    LK_SRMS_NORM_BLOCK = 2,  /* a block per row */
    LK_SRMS_NORM_CLUSTER = 3 /* sm_90 and later: a cluster of blocks per row */
};

/* One struct for both calls: a training step fills it once. F: forward, B: backward. A call ignores the fields of the other. */
typedef struct {
    const void *x;                /* F B in        T [rows, cols]; B: ignored where residual_out is given */
    const void *residual;         /* F B in        residual_dtype [rows, cols]; NULL: none; B: ignored likewise */
    void *residual_out;           /* F out, B in   residual_dtype [rows, cols], s; F: may be residual; NULL to skip;
                                                   B: s as forward wrote it; NULL: s is x + residual */
    float *rstd;                  /* F out, B in   f32 [rows]; F: NULL to skip; B: NULL: computed again from s and eps */
    const void *weight;           /* F B in        weight_dtype [groups, cols]; NULL: w is 1 */
    const void *bias;             /* F in          weight_dtype [groups, cols]; NULL means 0 */
    void *y;                      /* F out         T [rows, cols]; NULL to skip; may be x, which backward then lacks */
    const void *dy;               /* B in          dy_dtype [rows, cols], the gradient of y; NULL means 1, not 0 */
    const void *dresidual_out;    /* B in          residual_dtype [rows, cols], the gradient of residual_out; NULL: none */
    void *dx;                     /* B out         T [rows, cols]; may be dy or dresidual_out, of the same type; NULL to skip */
    void *dresidual;              /* B out         residual_dtype [rows, cols], ds rounded to that type; may be dresidual_out;
                                                   NULL to skip */
    void *dweight;                /* B out         dweight_dtype [groups, cols]; NULL to skip */
    void *dbias;                  /* B out         likewise */
    void *workspace;              /* B             for dweight and dbias, aligned to LK_WORKSPACE_ALIGNMENT; else not used */
    size_t workspace_bytes;       /* B             at least what ..._workspace_bytes_<T> answers */
    int64_t rows;                 /* F B           at least 0 */
    int64_t cols;                 /* F B           1 to 2^30 */
    int64_t groups;               /* F B           0 to 2^30 / cols, with both dweight and dbias at most 2^29; 0 means 1: one
                                                   weight for all rows; else one for every groups-th row: row r % groups of
                                                   weight, bias and their gradients */
    int64_t x_stride;             /* F B           elements between rows; 0 means packed, cols */
    int64_t residual_stride;      /* F B           likewise */
    int64_t residual_out_stride;  /* F B           likewise; 0 where residual_out is residual: residual's */
    int64_t y_stride;             /* F             likewise; 0 where y is x: x's */
    int64_t dy_stride;            /* B             elements between rows; 0 means packed, cols */
    int64_t dresidual_out_stride; /* B             likewise */
    int64_t dx_stride;            /* B             likewise; 0 where dx is dy or dresidual_out: that tensor's */
    int64_t dresidual_stride;     /* B             likewise; 0 where dresidual is dresidual_out: that tensor's */
    float eps;                    /* F B           finite, at least 0; there is no default; B with rstd: only checked */
    float weight_offset;          /* F B           finite; the factor is weight_offset + weight */
    int residual_dtype;           /* F B           LK_DTYPE_*: T or f32; 0 means T; of residual(_out) and gradients */
    int weight_dtype;             /* F B           LK_DTYPE_*, of weight and bias; 0 means T */
    int dweight_dtype;            /* B             LK_DTYPE_*, of dweight and dbias; 0 means T, whatever weight is */
    int accumulate;               /* B             not 0: dweight and dbias are added to the old ones; 0: they replace them */
    int path;                     /* F B           LK_SRMS_NORM_*; 0 chooses */
    int dy_dtype;                 /* B             LK_DTYPE_*: T or f32; 0 means T; of dy */
    int batch_invariant;          /* F             not 0: a row's results do not depend on the other rows. See Options */
    int round_sum;                /* F B           not 0: x + residual is rounded to residual_dtype. See Options */
} lk_srms_norm_args;

/* Errors, in the order of the checks, besides the rules of all ops in lk/README.md (overlap, alignment):
 *   LK_ERR_NULL       x is NULL, in backward residual_out too; all outputs are NULL
 *   LK_ERR_SHAPE      rows, cols or groups out of range; a stride that is not 0 and below cols; a tensor of more than 2^62
 *                     elements with its gaps
 *   LK_ERR_VALUE      eps is negative or not finite; weight_offset is not finite; residual_dtype, or in backward dy_dtype, is
 *                     neither T nor f32; another dtype or path is none of its enum
 *   LK_ERR_PATH       BLOCK, CLUSTER and batch_invariant with more than 2^27 rows; CLUSTER in code for less than sm_90
 *   LK_ERR_WORKSPACE  dweight or dbias is wanted, and workspace is NULL, too small or not aligned
 * Fastest: in every row all tensors reach a multiple of 16 bytes at the same column. Other rows are read and written element by
 * element. So are, in backward with dweight, rows of more than 2^21 columns (f32: 2^23) whose stride is not a multiple of 16
 * bytes, and a weight of 16 bits beside f32. forward is fastest with a weight of T on 16 bytes and without bias and groups.
 * So is backward of few rows without dweight, and all backward with dy of f32 beside 16-bit T, which has no kernel for few rows.
 * Other backward takes every weight alike. backward is fastest where dy is given, s comes from one tensor, and a row is a multiple
 * of 16 bytes. */

#define LK_SRMS_NORM_FUNCTIONS(X, T)                                                                                           \
    X##_CALL(srms_norm, forward, LK_FORWARD, T)                                                                                \
    X##_CALL(srms_norm, backward, LK_BACKWARD, T)
#define LK_DECLARE_SRMS_NORM(T) LK_DECLARE(SRMS_NORM, T)
#define LK_DEFINE_SRMS_NORM(T) LK_DEFINE(SRMS_NORM, T)

#if LK_CUDA

#include "lk_check.cuh"
#include "lk_row.cuh"

/* ---- What both directions share ------------------------------------------------------------------------------------------ */

/* Num elements of type Elem: one, or LK_VEC<T>, in one 16-byte access, or in two where Elem is float and T has 16 bits. The caches
 * may keep them: streaming accesses depend more on the distance of tensors in memory, and rows of odd length share lines. */
template <class Elem, int Num> LK_DEVICE void lk_srms_norm_unpack(float (&x)[Num], const lk_vec<Elem> (&raw)[Num / LK_VEC<Elem>])
{
    LK_UNROLL for (int i = 0; i < Num / LK_VEC<Elem>; i++) {
        float v[LK_VEC<Elem>];
        lk_unpack(v, raw[i]);
        LK_UNROLL for (int j = 0; j < LK_VEC<Elem>; j++) x[i * LK_VEC<Elem> + j] = v[j];
    }
}
template <class Elem, int Num> LK_DEVICE void lk_srms_norm_load_raw(lk_vec<Elem> (&raw)[Num], const Elem *from)
{
    LK_UNROLL for (int i = 0; i < Num; i++) raw[i] = lk_load_vec_ca(from + i * LK_VEC<Elem>);
}
template <class Elem> LK_DEVICE void lk_srms_norm_load(float (&x)[1], const Elem *from) { x[0] = lk_to_float(*from); }
template <class Elem, int Num> LK_DEVICE void lk_srms_norm_load(float (&x)[Num], const Elem *from)
{
    lk_vec<Elem> raw[Num / LK_VEC<Elem>];
    lk_srms_norm_load_raw(raw, from);
    lk_srms_norm_unpack<Elem, Num>(x, raw);
}
template <class Elem> LK_DEVICE void lk_srms_norm_store(Elem *to, const float (&x)[1]) { lk_put(to, x[0]); }
template <class Elem, int Num> LK_DEVICE void lk_srms_norm_store(Elem *to, const float (&x)[Num])
{
    LK_UNROLL for (int i = 0; i < Num / LK_VEC<Elem>; i++) {
        float v[LK_VEC<Elem>];
        LK_UNROLL for (int j = 0; j < LK_VEC<Elem>; j++) v[j] = x[i * LK_VEC<Elem> + j];
        lk_vec<Elem> raw;
        lk_pack(&raw, v);
        lk_store_vec_wb(to + i * LK_VEC<Elem>, raw);
    }
}

/* x[j] (offset + columns[j]), or with Plus x[j] + columns[j], without offset. columns is read 16 bytes at a time where it is
 * aligned to 16 bytes. Beside the vectors of a row that does not start on 16 bytes it may not be. */
template <bool Plus> LK_DEVICE float lk_srms_norm_apply(float x, float column, float offset)
{
    return Plus ? x + column : x * (offset + column);
}
template <bool Plus, class Elem, int Num> LK_DEVICE void lk_srms_norm_apply(float (&x)[Num], const Elem *columns, float offset)
{
    if constexpr (Num % LK_VEC<Elem> == 0) { /* not 16-bit elements beside vectors of f32 */
        if ((uintptr_t)columns % 16 == 0) {
            lk_vec<Elem> raw[Num / LK_VEC<Elem>];
            float w[Num];
            LK_UNROLL for (int i = 0; i < Num / LK_VEC<Elem>; i++) raw[i].raw = ((const uint4 *)columns)[i];
            lk_srms_norm_unpack<Elem, Num>(w, raw);
            LK_UNROLL for (int j = 0; j < Num; j++) x[j] = lk_srms_norm_apply<Plus>(x[j], w[j], offset);
            return;
        }
    }
    LK_UNROLL for (int j = 0; j < Num; j++) x[j] = lk_srms_norm_apply<Plus>(x[j], lk_to_float(columns[j]), offset);
}
/* The same with columns that the thread holds. */
template <bool Plus, class T> LK_DEVICE void lk_srms_norm_apply(float (&x)[LK_VEC<T>], lk_vec<T> columns, float offset)
{
    float w[LK_VEC<T>];
    lk_forget(&columns.raw); /* or its floats stay in registers too */
    lk_unpack(w, columns);
    LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) x[j] = lk_srms_norm_apply<Plus>(x[j], w[j], offset);
}

/* A tensor that a kernel reads; data NULL: there is none. part: the number of 16-byte parts of a vector before its own, where a
 * thread holds the vectors of all tensors in shared memory. */
typedef struct {
    const void *data;
    int64_t stride;
    int part;
} lk_srms_norm_tensor;

/* The input of a kernel, and how teams divide it. A row's team is 1 to 32 lanes of a warp, and a block has several teams; or a
 * block; or a cluster; each of its blocks takes a segment of the columns. */
typedef struct {
    lk_srms_norm_tensor x, r, dy, dr; /* of T, Res, Dy, Res: s = x + r, either may be NULL; r: residual or residual_out; dr:
                                         dresidual_out */
    int parts;                        /* of a vector, in all tensors */
    int team_log2;                    /* 0 to 5, or -1: the team is the block or the cluster */
    int segment;                      /* columns per block, a multiple of LK_VEC<T> in a cluster */
    int warp_span;                    /* vectors per warp of a block, a multiple of 32 */
    int aligned;                      /* all tensors' rows have their 16-byte boundaries at the same columns */
    int offset, offset_step;          /* row r starts offset + r offset_step elements behind a boundary, modulo LK_VEC<T> */
    float inverse_cols;
    int round_sum; /* not 0: s is a sum, and is rounded to Res */
} lk_srms_norm_input;

/* What a kernel gets. The arguments have all defaults filled in. */
typedef struct {
    lk_srms_norm_args a;
    lk_srms_norm_input in;
    int64_t partials; /* rows of the workspace, f32 [partials, pitch]: sums for dweight, one row per team; and as many for dbias
                         behind them. A row's first column is as many elements behind a 16-byte boundary as the team's rows are,
                         so that vectors stay vectors */
    int64_t pitch;
} lk_srms_norm_call;

/* The first element of a row's weight and bias. */
LK_DEVICE int lk_srms_norm_group_start(const lk_srms_norm_call &call, int64_t row)
{
    return call.a.groups > 1 ? (int)(row % call.a.groups * call.a.cols) : 0;
}
/* x times w, from element `at` of weight on; with Plus, x plus bias. */
template <bool Plus = false, int Num> LK_DEVICE void lk_srms_norm_apply(float (&x)[Num], const lk_srms_norm_call &call, int at)
{
    const void *columns = Plus ? call.a.bias : call.a.weight;
    const float offset = call.a.weight_offset;
    if (!columns) return;
    if (call.a.weight_dtype == LK_DTYPE_F32) lk_srms_norm_apply<Plus>(x, (const float *)columns + at, offset);
    else if (call.a.weight_dtype == LK_DTYPE_F16) lk_srms_norm_apply<Plus>(x, (const lk_f16 *)columns + at, offset);
    else lk_srms_norm_apply<Plus>(x, (const lk_bf16 *)columns + at, offset);
}
template <int Num> LK_DEVICE void lk_srms_norm_load_w(float (&w)[Num], const lk_srms_norm_call &call, int at)
{
    LK_UNROLL for (int j = 0; j < Num; j++) w[j] = 1.0f;
    lk_srms_norm_apply(w, call, at);
}

/* A thread's part of its team's rows. The vectors and single elements of all rows that it gets are at the same columns. A warp
 * reads a span of the vectors, and a lane every 32nd of them: a step that the compiler knows saves registers and
 * instructions. */
typedef struct {
    int64_t row;                /* the team's first row */
    int step, team;             /* rows to the team's next row; the number of the team in its block */
    int rank, size;             /* this thread among `size`: those of its team, but in a cluster those of its block */
    int first, count;     /* the column of the thread's first vector; u * 32 vectors on is another one while u * 32 < count */
    int begin, head, tail, edge; /* the block's first column; it has `edge` single elements, from there on; those from `head`
                                    on stand `tail` columns later */
} lk_srms_norm_thread;

/* The elements of a row behind the 16-byte boundary before its start, for vectors of Num. */
LK_DEVICE int lk_srms_norm_past(const lk_srms_norm_input &in, int64_t row, int Num)
{
    return (int)((unsigned)in.offset + (unsigned)row * (unsigned)in.offset_step) & (Num - 1);
}

/* The split of a block's `cols` columns of a row into vectors and single elements. vec: the thread's first vector; stop: its
 * warp's span ends there. Num 1: a "vector" is one element, and no element is a single one. */
template <class T, int Num = LK_VEC<T>>
LK_DEVICE lk_srms_norm_thread lk_srms_norm_split_row(lk_srms_norm_thread at, const lk_srms_norm_input &in, int cols, int vec,
                                                     int stop)
{
    int vecs = 0; /* where tensors are not aligned to each other all elements are single ones */
    if (Num == 1 || in.aligned)
        at.head = min(-lk_srms_norm_past(in, at.row, Num) & (Num - 1), cols), vecs = (cols - at.head) / Num;
    at.edge = cols - vecs * Num, at.tail = vecs * Num;
    at.first = at.begin + at.head + vec * Num, at.count = min(vecs, stop) - vec;
    return at;
}
template <class T, int Num = LK_VEC<T>>
LK_DEVICE lk_srms_norm_thread lk_srms_norm_thread_of(const lk_srms_norm_input &in, int cols)
{
    lk_srms_norm_thread at = {};
    if (in.team_log2 >= 0) { /* several teams per block */
        const int teams = (int)blockDim.x >> in.team_log2;
        at.team = (int)threadIdx.x >> in.team_log2, at.size = 1 << in.team_log2, at.rank = (int)threadIdx.x & (at.size - 1);
        at.row = (int64_t)blockIdx.x * teams + at.team, at.step = (int)gridDim.x * teams;
        return lk_srms_norm_split_row<T, Num>(at, in, cols, at.rank, cols); /* in each branch: fewer registers than behind them */
    }
    const unsigned blocks = lk_cluster_nctarank();
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    at.row = blockIdx.x / blocks, at.step = (int)(gridDim.x / blocks), at.rank = (int)threadIdx.x, at.size = (int)blockDim.x;
    at.begin = min((int)lk_cluster_ctarank() * in.segment, cols), cols = min(cols - at.begin, in.segment);
    return lk_srms_norm_split_row<T, Num>(at, in, cols, warp * in.warp_span + lane, (warp + 1) * in.warp_span);
}
/* The column of single element i. */
LK_DEVICE int lk_srms_norm_edge(const lk_srms_norm_thread &at, int i)
{
    return at.begin + (i < at.head ? i : at.tail + i);
}

/* The same for few rows: a block's threads hold a row, which starts and ends on 16 bytes. */
#define LK_SRMS_NORM_FEW_VECS 2
template <class T> LK_DEVICE lk_srms_norm_thread lk_srms_norm_few_thread(int cols)
{
    const int vec = (int)threadIdx.x / 32 * LK_SRMS_NORM_FEW_VECS * 32 + (int)threadIdx.x % 32;
    lk_srms_norm_thread at = {};
    at.row = blockIdx.x, at.rank = (int)threadIdx.x, at.size = (int)blockDim.x;
    at.first = vec * LK_VEC<T>, at.count = cols / LK_VEC<T> - vec;
    return at;
}

/* Rounds s to Res, with round_sum. */
template <class Res, int Num> LK_DEVICE void lk_srms_norm_round(float (&s)[Num], const lk_srms_norm_input &in)
{
    if (sizeof(Res) == 2 && in.round_sum) {
        LK_UNROLL for (int j = 0; j < Num; j++) {
            Res rounded;
            lk_put(&rounded, s[j]);
            s[j] = lk_to_float(rounded);
        }
    }
}

/* Num elements of s = x + r from global memory. */
template <class T, class Res, int Num>
LK_DEVICE void lk_srms_norm_load_s(float (&s)[Num], const lk_srms_norm_input &in, int64_t row, int col)
{
    LK_UNROLL for (int j = 0; j < Num; j++) s[j] = 0.0f;
    if (in.x.data) lk_srms_norm_load(s, (const T *)in.x.data + row * in.x.stride + col);
    if (!in.r.data) return;
    float r[Num];
    lk_srms_norm_load(r, (const Res *)in.r.data + row * in.r.stride + col);
    LK_UNROLL for (int j = 0; j < Num; j++) s[j] += r[j];
    lk_srms_norm_round<Res>(s, in);
}

/* A vector of s in a thread's registers, from the sum to the scaling. Packed: s is one tensor of T, and the vector stays as it
 * was loaded, since unpacking it twice costs less than registers. Otherwise: the float sum. */
template <class T, bool Packed> struct lk_srms_norm_held {
    lk_vec<T> s;
};
template <class T> struct lk_srms_norm_held<T, false> {
    float s[LK_VEC<T>];
};
template <class T> LK_DEVICE void lk_srms_norm_get(float (&s)[LK_VEC<T>], lk_srms_norm_held<T, true> *held)
{
    lk_forget(&held->s.raw);
    lk_unpack(s, held->s);
}
template <class T> LK_DEVICE void lk_srms_norm_get(float (&s)[LK_VEC<T>], lk_srms_norm_held<T, false> *held)
{
    LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) s[j] = held->s[j];
}

/* Prefetches the first vector of a thread's first row into the L2, before loads are allowed. */
template <class Elem> LK_DEVICE void lk_srms_norm_prefetch(const lk_srms_norm_tensor &t, const lk_srms_norm_thread &at)
{
    if (t.data) lk_prefetch_l2((const Elem *)t.data + at.row * t.stride + at.first);
}

/* Loads Vecs vectors per thread, every 32nd from column col on, where `count` vectors are left. */
template <class Elem, int Parts, int Vecs>
LK_DEVICE void lk_srms_norm_load_raw(lk_vec<Elem> (&raw)[Vecs][Parts], const lk_srms_norm_tensor &t, int64_t row, int col, int count)
{
    if (!t.data) return;
    const Elem *from = (const Elem *)t.data + row * t.stride + col;
    LK_UNROLL for (int u = 0; u < Vecs; u++)
        if (u * 32 < count) lk_srms_norm_load_raw(raw[u], from + u * 32 * Parts * LK_VEC<Elem>);
}
/* s = x + r; either may be NULL. */
template <class T, class Res>
LK_DEVICE void lk_srms_norm_add(float (&s)[LK_VEC<T>], const lk_srms_norm_input &in, const lk_vec<T> (&x)[1],
                                const lk_vec<Res> (&r)[LK_VEC<T> / LK_VEC<Res>])
{
    constexpr int Num = LK_VEC<T>;
    float add[Num];
    LK_UNROLL for (int j = 0; j < Num; j++) s[j] = 0.0f;
    if (in.x.data) lk_unpack(s, x[0]);
    lk_srms_norm_unpack<Res, Num>(add, r);
    LK_UNROLL for (int j = 0; j < Num && in.r.data; j++) s[j] += add[j];
    lk_srms_norm_round<Res>(s, in);
}
/* The first Vecs vectors of s of a thread. */
template <class T, class Res, int Vecs>
LK_DEVICE void lk_srms_norm_hold(lk_srms_norm_held<T, true> (&held)[Vecs], const lk_srms_norm_input &in, int64_t row, int col,
                                 int count)
{
    const T *x = (const T *)in.x.data + row * in.x.stride + col;
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        if (u * 32 >= count) break; /* loads under predicates start later, each with its own address; sm_80 spills */
        held[u].s = lk_load_vec_ca(x + u * 32 * LK_VEC<T>);
    }
}
template <class T, class Res, int Vecs>
LK_DEVICE void lk_srms_norm_hold(lk_srms_norm_held<T, false> (&held)[Vecs], const lk_srms_norm_input &in, int64_t row, int col,
                                 int count)
{
    lk_vec<T> x[Vecs][1];
    lk_vec<Res> r[Vecs][LK_VEC<T> / LK_VEC<Res>];
    lk_srms_norm_load_raw(x, in.x, row, col, count);
    lk_srms_norm_load_raw(r, in.r, row, col, count);
    LK_UNROLL for (int u = 0; u < Vecs; u++) lk_srms_norm_add<T, Res>(held[u].s, in, x[u], r[u]);
}

/* The sums over a row's team; number: as in lk_sum_cluster. alone: the first of two alone. */
template <int Num> LK_DEVICE void lk_srms_norm_sum(const lk_srms_norm_input &in, float (&v)[Num], int number, bool alone = false)
{
    if constexpr (Num == 2) {
        float first[1] = {v[0]};
        if (alone) return lk_srms_norm_sum(in, first, number), (void)(v[0] = first[0]);
    }
    if (in.team_log2 < 0) return lk_sum_cluster(v, number);
    LK_UNROLL for (int n = 0; n < Num; n++) v[n] = lk_sum_warp(v[n], 1 << in.team_log2);
}

/* A sum in short chains: in a long chain of similar terms, such as squares, rounding errors have one sign. */
typedef struct {
    float sum, chain;
    int count;
} lk_srms_norm_total;

LK_DEVICE void lk_srms_norm_add(lk_srms_norm_total *total, float x)
{
    total->chain += x;
    if (++total->count % 16 == 0) total->sum += total->chain, total->chain = 0.0f;
}

template <int Num> LK_DEVICE float lk_srms_norm_dot(const float (&a)[Num], const float (&b)[Num])
{
    float sum[2] = {0.0f, 0.0f}; /* two chains for vectors of 8, to hide latency */
    LK_UNROLL for (int j = 0; j < Num; j++) sum[j / 4 % 2] = fmaf(a[j], b[j], sum[j / 4 % 2]);
    return sum[0] + sum[1];
}

/* Threads of a large block, and the vectors of a row that a thread of forward holds. */
#define LK_SRMS_NORM_THREADS 512
#define LK_SRMS_NORM_FORWARD_VECS(packed) ((packed) ? 8 : 4)
/* Blocks of that size per SM. They bound a thread's registers: 64 are enough for 8 packed vectors of 16-bit elements, or for 4
 * and their weight, up to sm_90; on sm_90 also for 8 of f32. More registers are slower. */
#define LK_SRMS_NORM_FORWARD_BLOCKS(T, packed)                                                                                 \
    ((packed) && (LK_ARCH == 900 || (LK_ARCH < 900 && sizeof(T) == 2)) ? 2 : 1)

/* Most blocks per SM of the kernels for few rows. */
#define LK_SRMS_NORM_FEW_BLOCKS 8

/* ---- How the rows are divided -------------------------------------------------------------------------------------------- */

/* The tensors of a call, for the checks and for the layout: first those of rows, and of these the inputs first. */
#define LK_SRMS_NORM_ROW_TENSORS 8
typedef struct {
    lk_tensor list[LK_SRMS_NORM_ROW_TENSORS + 6];
} lk_srms_norm_table;

/* gated: gate and dgate stand where the residual and its gradient do, for srms_norm_gated.cuh. */
template <class T> LK_HOST lk_srms_norm_table lk_srms_norm_tensors(lk_srms_norm_args *a, bool backward, bool gated = false)
{
    const int bytes = sizeof(T), residual_bytes = lk_dtype_bytes<T>(a->residual_dtype), dy_bytes = lk_dtype_bytes<T>(a->dy_dtype);
    const bool summed = backward && a->residual_out; /* then x and residual are ignored */
    const int source = summed ? LK_UNUSED : LK_IN, forward_out = backward ? LK_UNUSED : LK_OUT;
    const int backward_in = backward ? LK_IN : LK_UNUSED, backward_out = backward ? LK_OUT : LK_UNUSED;
    const int64_t rows = a->rows, cols = a->cols, columns = lk_count(a->groups, cols);
    const bool sums = backward && rows && (a->dweight || a->dbias);
    return {{
        {"x", a->x, bytes, source | LK_REQUIRED, cols, {{rows, &a->x_stride, "x_stride"}}},
        {gated ? "gate" : "residual", a->residual, residual_bytes, source | (gated ? LK_REQUIRED : 0), cols,
         {{rows, &a->residual_stride, gated ? "gate_stride" : "residual_stride"}}},
        {"residual_out", a->residual_out, residual_bytes, summed ? LK_REQUIRED : backward ? LK_IN : LK_OUT, cols,
         {{rows, &a->residual_out_stride, "residual_out_stride"}}, {backward ? NULL : "residual"}},
        {"dy", a->dy, dy_bytes, backward_in, cols, {{rows, &a->dy_stride, "dy_stride"}}},
        {"dresidual_out", a->dresidual_out, residual_bytes, backward_in, cols,
         {{rows, &a->dresidual_out_stride, "dresidual_out_stride"}}},
        {"y", a->y, bytes, forward_out, cols, {{rows, &a->y_stride, "y_stride"}}, {"x"}},
        {"dx", a->dx, bytes, backward_out, cols, {{rows, &a->dx_stride, "dx_stride"}},
         {dy_bytes == bytes ? "dy" : NULL, residual_bytes == bytes ? "dresidual_out" : NULL}},
        {gated ? "dgate" : "dresidual", a->dresidual, residual_bytes, backward_out, cols,
         {{rows, &a->dresidual_stride, gated ? "dgate_stride" : "dresidual_stride"}}, {"dresidual_out"}},
        {"weight", a->weight, lk_dtype_bytes<T>(a->weight_dtype), LK_IN, rows ? columns : 0},
        {"bias", a->bias, lk_dtype_bytes<T>(a->weight_dtype), backward ? LK_UNUSED : LK_IN, rows ? columns : 0},
        {"rstd", a->rstd, 4, backward ? LK_IN : LK_OUT, rows},
        {"dweight", a->dweight, lk_dtype_bytes<T>(a->dweight_dtype), backward_out, columns},
        {"dbias", a->dbias, lk_dtype_bytes<T>(a->dweight_dtype), backward_out, columns},
        lk_workspace(a->workspace, sums ? a->workspace_bytes : 0),
    }};
}

/* Whether a thread can hold weight, or bias, as it holds rows: it is of T, on 16 bytes and the same for all rows, or NULL. */
template <class T> LK_HOST bool lk_srms_norm_plain(const lk_srms_norm_args *a, const void *columns)
{
    return !columns || (a->weight_dtype == lk_dtype<T> && a->groups == 1 && (uintptr_t)columns % 16 == 0);
}

/* The same for a thread that reads each row's: it may be of groups. Rows are vectors. */
template <class T> LK_HOST bool lk_srms_norm_vector_weight(const lk_srms_norm_args *a)
{
    return !a->weight || (a->weight_dtype == lk_dtype<T> && (uintptr_t)a->weight % 16 == 0);
}

/* Whether kernels round s: where they compute it as a sum. */
LK_HOST int lk_srms_norm_rounds(const lk_srms_norm_args *a, bool backward)
{
    return a->round_sum && a->x && a->residual && !(backward && a->residual_out);
}

/* A kernel's limits: the vectors that a thread can hold, and those that it gets where there are enough threads; bytes of shared
 * memory per thread and part of a vector, and per thread besides; most threads per block, and threads of a block with several
 * teams; whether a team has a thread for each single element; most threads per SM for which the kernel for few rows is faster. */
typedef struct {
    int most_vecs, preferred_vecs, part_bytes, bias_bytes, most_threads, team_threads, singles, few_rows_limit;
} lk_srms_norm_traits;

/* A launch. Each team has one row; in backward with weight, dweight or dbias it may have many (persistent blocks). */
typedef struct {
    lk_srms_norm_call call;
    int threads, cluster;
    int64_t grid;
    bool edges;  /* rows have single elements at their ends */
    bool few;    /* the kernel for few rows takes them */
    bool short_rows; /* the kernel for short rows takes them */
    bool reread, many, held; /* backward's Reread; its kernel for many rows, and Held */
    int gated;   /* the kernel of srms_norm_gated.cuh */
    size_t smem, workspace;
} lk_srms_norm_layout;

/* Most bytes of dynamic shared memory per block. From sm_80 on a block may have at least 99 KiB; 7 KiB of these are static. */
#define LK_SRMS_NORM_SMEM (92 * 1024)

/* The kernels for short rows, of at most 32 vectors: a team's lanes have one vector each, of several rows at a time. A row of such
 * a length per team leaves too few loads in flight. */
#define LK_SRMS_NORM_SHORT_ROWS 2
#define LK_SRMS_NORM_SHORT_THREADS 128
#define LK_SRMS_NORM_SHORT_BLOCKS(T) (lk_dtype<T> == LK_DTYPE_F16 ? 6 : 8) /* per SM: 64 registers per thread spill in f16 */

/* Whether there are enough short rows to keep all SMs busy. `layout` is that of teams of lanes, and gets the other threads. */
template <class T> LK_HOST bool lk_srms_norm_are_short(const lk_device *device, const lk_srms_norm_args *a, lk_srms_norm_layout *layout)
{
    const lk_srms_norm_input *const in = &layout->call.in;
    const int threads = LK_SRMS_NORM_SHORT_THREADS;
    const bool usual = a->path == LK_SRMS_NORM_AUTO || a->path == LK_SRMS_NORM_WARP;
    if (!usual || in->team_log2 < 0 || !in->aligned || layout->edges || a->cols > 32 * LK_VEC<T> || layout->few) return false;
    const int64_t each = (int64_t)(threads >> in->team_log2) * LK_SRMS_NORM_SHORT_ROWS; /* rows of a block */
    const int64_t blocks = lk_ceil_div(lk_team_rows(a->rows, a->batch_invariant), each);
    if (blocks < (int64_t)LK_SRMS_NORM_SHORT_BLOCKS(T) / 2 * device->sms) return false;
    layout->short_rows = true, layout->threads = threads, layout->grid = lk_ceil_div(a->rows, each);
    return true;
}

/* Divides the rows among teams. a: checked. */
template <class T>
LK_HOST lk_srms_norm_layout lk_srms_norm_lay_out(const lk_device *device, lk_srms_norm_args *a, bool backward,
                                                 lk_srms_norm_traits traits)
{
    constexpr int Num = LK_VEC<T>;
    lk_srms_norm_layout layout = {};
    layout.call.a = *a, layout.cluster = 1;
    const lk_srms_norm_table table = lk_srms_norm_tensors<T>(a, backward);
    lk_srms_norm_input *in = &layout.call.in;
    lk_srms_norm_tensor *const inputs[] = {&in->x, &in->r, &in->r, &in->dy, &in->dr}; /* the first tensors of the table */
    in->inverse_cols = 1.0f / (float)a->cols, in->round_sum = lk_srms_norm_rounds(a, backward);
    in->aligned = 1;
    const lk_tensor *given[LK_SRMS_NORM_ROW_TENSORS], *base = NULL; /* base: the first of T, or else of f32 */
    int count = 0;
    for (int i = 0; i < LK_SRMS_NORM_ROW_TENSORS; i++) {
        const lk_tensor *const t = &table.list[i];
        if (!t->pointer || t->use & LK_UNUSED || lk_in_place_of(table.list, t)) continue; /* in place: the other is there */
        given[count++] = t;
        if (!base || t->bytes < base->bytes) base = t;
        if (t->use & LK_OUT) continue;
        *inputs[i] = {t->pointer, *t->dim[0].stride, in->parts};
        in->parts += Num * t->bytes / 16;
    }
    if (base) in->offset = (int)((uintptr_t)base->pointer / (unsigned)base->bytes % (unsigned)Num);
    if (base) in->offset_step = (int)(*base->dim[0].stride % Num);
    for (int i = 0; i < count; i++) {
        const int vec = 16 / given[i]->bytes;
        const int64_t offset = (int64_t)((uintptr_t)given[i]->pointer / (unsigned)given[i]->bytes);
        if ((offset - in->offset) % vec || (*given[i]->dim[0].stride - in->offset_step) % vec) in->aligned = 0;
    }
    const int64_t rows = a->rows, cols = a->cols, many = lk_team_rows(rows, a->batch_invariant);
    int path = a->path;
    layout.edges = in->offset || in->offset_step || cols % Num;
    /* What threads share out: the vectors of a row, or its elements where tensors are not aligned to each other. */
    const int64_t units = in->aligned ? lk_ceil_div(cols, Num) : cols;
    layout.threads = (int)(lk_ceil_div(units, 32 * LK_SRMS_NORM_FEW_VECS) * 32); /* for few rows */
    if (path == LK_SRMS_NORM_AUTO && in->aligned && !layout.edges && layout.threads <= LK_SRMS_NORM_THREADS &&
        many <= LK_SRMS_NORM_FEW_BLOCKS * device->sms && many * layout.threads <= (int64_t)traits.few_rows_limit * device->sms) {
        layout.few = true, layout.grid = rows;
        return layout;
    }
    /* A thread gets as many vectors as it can hold where all rows are resident together, and where rows do not start or end on
     * 16 bytes, so that fewer warps use one line. */
    const bool resident = many * units <= (int64_t)traits.most_vecs * 1024 * device->sms;
    const int thread_vecs = layout.edges || resident ? traits.most_vecs : traits.preferred_vecs;
    const int thread_bytes = traits.part_bytes * in->parts + traits.bias_bytes;
    int64_t most = traits.most_threads;
    if (most * thread_bytes > LK_SRMS_NORM_SMEM) most = LK_SRMS_NORM_SMEM / thread_bytes / 32 * 32;
    if (path == LK_SRMS_NORM_AUTO) {
        path = units <= 32 * thread_vecs || many > LK_TEAM_ROWS ? LK_SRMS_NORM_WARP : LK_SRMS_NORM_BLOCK;
        if (path == LK_SRMS_NORM_BLOCK && units > most * traits.most_vecs && device->arch >= 90) path = LK_SRMS_NORM_CLUSTER;
    }
    in->segment = (int)cols;
    if (path == LK_SRMS_NORM_WARP) {
        const int64_t lanes = traits.singles && layout.edges && units < 2 * Num - 2 ? 2 * Num - 2 : units;
        while (in->team_log2 < 5 && 1 << in->team_log2 < lanes) in->team_log2++;
        layout.threads = traits.team_threads;
        layout.grid = lk_ceil_div(rows, layout.threads >> in->team_log2);
        return layout;
    }
    in->team_log2 = -1;
    if (path == LK_SRMS_NORM_CLUSTER) {
        layout.cluster = 2;
        while (layout.cluster < 8 && lk_ceil_div(units, layout.cluster) > most * traits.most_vecs) layout.cluster *= 2;
        in->segment = (int)(lk_ceil_div(lk_ceil_div(cols, layout.cluster), 8 * Num) * 8 * Num); /* whole lines of 128 bytes */
    }
    const int64_t block_units = lk_ceil_div(units, layout.cluster);
    int64_t threads = lk_ceil_div(block_units, thread_vecs);
    while (threads < block_units && many * layout.cluster * threads < 1024 * (int64_t)device->sms) threads *= 2; /* few rows */
    threads = lk_ceil_div(threads < block_units ? threads : block_units, 32) * 32;
    layout.threads = (int)(threads < most ? threads : most);
    in->warp_span = in->aligned ? (int)lk_ceil_div(block_units, layout.threads) * 32 : 32; /* 2^30 times Num is no int */
    layout.grid = rows * layout.cluster;
    return layout;
}

/* ---- Forward ------------------------------------------------------------------------------------------------------------- */

/* BARE: no weight and no bias. WEIGHED: weight is of T and on 16 bytes as the rows of x are, and bias likewise. A thread holds
 * its vectors of weight too, since reading them behind the sum is slower. FEW: few rows, whose time is latency. Rows start and
 * end on 16 bytes, and a block's threads hold all of a row, and of weight as WEIGHED does. The code is short: a block that
 * has just started waits for its instructions. GENERAL: any rows and options; weight and bias are read behind the sum. */
enum { LK_SRMS_NORM_BARE, LK_SRMS_NORM_WEIGHED, LK_SRMS_NORM_FEW, LK_SRMS_NORM_GENERAL };

/* Writes Num elements of a row. weight: what the thread of WEIGHED or FEW holds of it. */
template <class T, class Res, int Kind, int Num>
LK_DEVICE void lk_srms_norm_forward_put(const lk_srms_norm_call &call, float rstd, float (&s)[Num], int64_t row, int col, int group,
                                        lk_vec<T> weight)
{
    if (call.a.residual_out) lk_srms_norm_store((Res *)call.a.residual_out + row * call.a.residual_out_stride + col, s);
    if (!call.a.y) return;
    LK_UNROLL for (int j = 0; j < Num; j++) s[j] *= rstd;
    if constexpr (Kind == LK_SRMS_NORM_GENERAL) {
        lk_srms_norm_apply(s, call, group + col);
        lk_srms_norm_apply<true>(s, call, group + col);
    }
    if constexpr (Kind == LK_SRMS_NORM_WEIGHED || Kind == LK_SRMS_NORM_FEW)
        if (call.a.weight) lk_srms_norm_apply<false>(s, weight, call.a.weight_offset);
    if constexpr (Kind == LK_SRMS_NORM_WEIGHED)
        if (call.a.bias) lk_srms_norm_apply<true>(s, lk_load_vec_ca((const T *)call.a.bias + col), 0.0f);
    lk_srms_norm_store((T *)call.a.y + row * call.a.y_stride + col, s);
}

/* A team owns a row. Each thread holds its first Vecs vectors. All their loads start before it waits for one. It reads the other
 * vectors twice, and so the single elements at a row's ends. */
template <class T, class Res, bool Packed, int Kind>
LK_KERNEL void __launch_bounds__(LK_SRMS_NORM_THREADS, LK_SRMS_NORM_FORWARD_BLOCKS(T, Packed && Kind != LK_SRMS_NORM_GENERAL))
    lk_srms_norm_forward_kernel(const __grid_constant__ lk_srms_norm_call call)
{
    constexpr bool Few = Kind == LK_SRMS_NORM_FEW, HoldsWeight = Few || Kind == LK_SRMS_NORM_WEIGHED;
    constexpr int Rest = Kind == LK_SRMS_NORM_BARE ? Kind : LK_SRMS_NORM_GENERAL;
    constexpr int Num = LK_VEC<T>, Vecs = Few ? LK_SRMS_NORM_FEW_VECS : LK_SRMS_NORM_FORWARD_VECS(Packed && !HoldsWeight);
    const lk_srms_norm_input &in = call.in;
    const lk_srms_norm_thread at =
        Few ? lk_srms_norm_few_thread<T>((int)call.a.cols) : lk_srms_norm_thread_of<T>(in, (int)call.a.cols);
    const bool owner = Few || at.row < call.a.rows; /* lanes without a row still take part in the warp's reduction */
    const int count = owner ? at.count : 0, edge = owner ? at.edge : 0;
    if (!Few) lk_cluster_begin();
    /* Larger teams are slower with a prefetch and an early start of the next kernel. On sm_80 the prefetch only spills. */
    const bool early = Few || (LK_ARCH >= 900 && at.size <= 64);
    if (early && count > 0) {
        lk_srms_norm_prefetch<T>(in.x, at);
        lk_srms_norm_prefetch<Res>(in.r, at);
        if (Few) lk_srms_norm_prefetch<T>({call.a.weight, 0, 0}, at);
    }
    lk_griddepcontrol_wait();
    if (early) lk_griddepcontrol_launch_dependents();

    lk_vec<T> weight[Vecs][1];
    if (HoldsWeight) lk_srms_norm_load_raw(weight, {call.a.weight, 0, 0}, 0, at.first, count);
    lk_srms_norm_held<T, Packed> held[Vecs];
    lk_srms_norm_hold<T, Res>(held, in, at.row, at.first, count);
    lk_srms_norm_total total = {};
    float s[Num], one[1];
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        if (!Few && u * 32 >= count) break; /* FEW takes fewer registers without it, the others more */
        lk_srms_norm_get<T>(s, &held[u]);
        if (u * 32 < count) total.sum += lk_srms_norm_dot(s, s);
    }
    LK_NO_UNROLL for (int i = Vecs * 32; !Few && i < count; i += 32) {
        lk_srms_norm_load_s<T, Res>(s, in, at.row, at.first + i * Num);
        lk_srms_norm_add(&total, lk_srms_norm_dot(s, s));
    }
    for (int i = at.rank; !Few && i < edge; i += at.size) {
        lk_srms_norm_load_s<T, Res>(one, in, at.row, lk_srms_norm_edge(at, i));
        lk_srms_norm_add(&total, one[0] * one[0]);
    }
    if (!Few) lk_cluster_ready();
    float sum[1] = {total.sum + total.chain};
    if (Few) lk_sum_cluster<1, true>(sum, 0);
    else lk_srms_norm_sum(in, sum, 0);
    if (!early) lk_griddepcontrol_launch_dependents();

    const float rstd = lk_rsqrt(fmaf(sum[0], in.inverse_cols, call.a.eps));
    const int group = Kind == LK_SRMS_NORM_GENERAL ? lk_srms_norm_group_start(call, at.row) : 0;
    if (owner && at.begin == 0 && at.rank == 0 && call.a.rstd) call.a.rstd[at.row] = rstd;
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        if (u * 32 >= count) break;
        lk_srms_norm_get<T>(s, &held[u]);
        lk_srms_norm_forward_put<T, Res, Kind>(call, rstd, s, at.row, at.first + u * 32 * Num, group, weight[u][0]);
    }
    LK_NO_UNROLL for (int i = Vecs * 32; !Few && i < count; i += 32) {
        lk_srms_norm_load_s<T, Res>(s, in, at.row, at.first + i * Num);
        lk_srms_norm_forward_put<T, Res, Rest>(call, rstd, s, at.row, at.first + i * Num, group, {});
    }
    LK_NO_UNROLL for (int i = at.rank; !Few && i < edge; i += at.size) {
        const int col = lk_srms_norm_edge(at, i);
        lk_srms_norm_load_s<T, Res>(one, in, at.row, col);
        lk_srms_norm_forward_put<T, Res, Rest>(call, rstd, one, at.row, col, group, {});
    }
}

/* Short rows, of BARE or WEIGHED without residual and bias; weight may be of groups. */
template <class T>
LK_KERNEL void __launch_bounds__(LK_SRMS_NORM_SHORT_THREADS, LK_SRMS_NORM_SHORT_BLOCKS(T))
    lk_srms_norm_forward_short_kernel(const __grid_constant__ lk_srms_norm_call call)
{
    constexpr int Num = LK_VEC<T>, Rows = LK_SRMS_NORM_SHORT_ROWS;
    const lk_srms_norm_args &a = call.a;
    const int lanes = 1 << call.in.team_log2, teams = (int)blockDim.x >> call.in.team_log2, groups = (int)a.groups;
    const int col = ((int)threadIdx.x & (lanes - 1)) * Num, cols = (int)a.cols;
    const int64_t first = (int64_t)blockIdx.x * teams * Rows + ((int)threadIdx.x >> call.in.team_log2);
    const int next = teams % groups; /* from a row's group to that of the thread's next row */
    int group = groups > 1 ? (int)(first % groups) : 0;
    lk_vec<T> x[Rows] = {}, weight[Rows] = {};
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    LK_UNROLL for (int u = 0; u < Rows; u++)
        if (col < cols && first + u * teams < a.rows)
            x[u] = lk_load_vec_ca((const T *)a.x + (first + u * teams) * a.x_stride + col);
    LK_UNROLL for (int u = 0; u < Rows; u++) {
        if (u > 0) weight[u] = weight[0];
        if (col < cols && a.weight && (u == 0 || groups > 1)) weight[u] = lk_load_vec_ca((const T *)a.weight + group * cols + col);
        group = group + next < groups ? group + next : group + next - groups;
    }
    float s[Num], sum[Rows];
    LK_UNROLL for (int u = 0; u < Rows; u++) {
        lk_unpack(s, x[u]);
        sum[u] = lk_srms_norm_dot(s, s);
    }
    LK_UNROLL for (int u = 0; u < Rows; u++) sum[u] = lk_sum_warp(sum[u], lanes);
    LK_UNROLL for (int u = 0; u < Rows; u++) {
        const int64_t row = first + u * teams;
        const float rstd = lk_rsqrt(fmaf(sum[u], call.in.inverse_cols, a.eps));
        if (col >= cols || row >= a.rows) continue;
        if (col == 0 && a.rstd) a.rstd[row] = rstd;
        lk_forget(&x[u].raw); /* or its floats stay in registers too */
        lk_unpack(s, x[u]);
        lk_srms_norm_forward_put<T, T, LK_SRMS_NORM_FEW>(call, rstd, s, row, col, 0, weight[u]);
    }
}

template <class T, class Res, bool Packed> LK_HOST void (*lk_srms_norm_forward_choose(int kind))(lk_srms_norm_call)
{
    return kind == LK_SRMS_NORM_FEW       ? lk_srms_norm_forward_kernel<T, Res, false, LK_SRMS_NORM_FEW>
           : kind == LK_SRMS_NORM_WEIGHED ? lk_srms_norm_forward_kernel<T, Res, Packed, LK_SRMS_NORM_WEIGHED>
           : kind == LK_SRMS_NORM_BARE    ? lk_srms_norm_forward_kernel<T, Res, Packed, LK_SRMS_NORM_BARE>
                                          : lk_srms_norm_forward_kernel<T, Res, Packed, LK_SRMS_NORM_GENERAL>;
}

template <class T>
LK_HOST lk_status lk_srms_norm_forward_rows(const char *op, const lk_device *device, lk_srms_norm_args *a, cudaStream_t stream)
{
    const bool other = a->residual_dtype != lk_dtype<T>, packed = !other && !a->residual;
    const bool fits = (uintptr_t)a->x % 16 == 0 && a->x_stride % LK_VEC<T> == 0 &&
                      a->cols / LK_VEC<T> <= LK_SRMS_NORM_THREADS * LK_SRMS_NORM_FORWARD_VECS(false);
    const bool plain = lk_srms_norm_plain<T>(a, a->weight) && lk_srms_norm_plain<T>(a, a->bias);
    const int kind = !a->weight && !a->bias ? LK_SRMS_NORM_BARE
                     : plain && fits      ? LK_SRMS_NORM_WEIGHED
                                          : LK_SRMS_NORM_GENERAL;
    /* The kernel for few rows is faster up to 2048 threads per SM, that of backward up to 256. */
    const lk_srms_norm_traits traits = {LK_SRMS_NORM_FORWARD_VECS(packed && kind != LK_SRMS_NORM_WEIGHED), 4, 0, 0,
                                        LK_SRMS_NORM_THREADS, 128, 0, plain && !a->bias ? 2048 : 0};
    lk_srms_norm_layout layout = lk_srms_norm_lay_out<T>(device, a, false, traits);
    const int chosen = layout.few ? LK_SRMS_NORM_FEW : kind;
    const bool simple = packed && !a->residual_out && !a->bias && lk_srms_norm_vector_weight<T>(a);
    if (simple && lk_srms_norm_are_short<T>(device, a, &layout))
        return lk_launch_pdl(op, device, lk_srms_norm_forward_short_kernel<T>, layout.grid, 1, layout.threads, 0, stream, layout.call);
    return lk_launch_pdl(op, device,
                         other    ? lk_srms_norm_forward_choose<T, float, false>(chosen)
                         : packed ? lk_srms_norm_forward_choose<T, T, true>(chosen)
                                  : lk_srms_norm_forward_choose<T, T, false>(chosen),
                         layout.grid, layout.cluster, layout.threads, 0, stream, layout.call);
}

/* ---- Backward ------------------------------------------------------------------------------------------------------------ */

/* Vectors of a row that a thread holds, rows in flight, and most threads per block. weight: there is weight, dweight or dbias. Then
 * a thread also has a register for dweight's sum of each element that it holds, and the copies of the next row in flight. */
#define LK_SRMS_NORM_BACKWARD_VECS 4
#define LK_SRMS_NORM_BACKWARD_STAGES(weight) ((weight) ? 2 : 1)
#define LK_SRMS_NORM_BACKWARD_THREADS(weight) ((weight) ? 256 : 512)
/* The same where teams have many rows each, and threads per SM. Half the vectors leave registers for more threads. Or, held, for s
 * and dy of a row between the sums and the scaling, which is faster beside a residual's gradient. */
#define LK_SRMS_NORM_MANY_VECS 2
#define LK_SRMS_NORM_MANY_THREADS(held) ((held) ? 512 : 768)
#define LK_SRMS_NORM_TEAM_THREADS 64 /* of a block with several teams */

/* The vectors that threads hold, from the sums to the scaling: [warp][stage][part][vector][lane]. No barrier guards them, since
 * each lane reads only its own. The copies need no registers, and all of them are in flight together. With dbias a warp's stages
 * are followed by its sums of the elements that its lanes hold: [vector][half][lane], four to each. Registers are too few for them. */
typedef struct {
    uint4 held[1]; /* the launch gives the number */
} lk_srms_norm_smem;
#define LK_SRMS_NORM_BIAS_BYTES(T) (LK_SRMS_NORM_BACKWARD_VECS * LK_VEC<T> * 4)

/* Where Num elements of a row are read: in the lane's slots for a vector, which has slots for Copied vectors; Copied is 0: in global
 * memory. group: the first element of the row's weight. */
template <int Copied> struct lk_srms_norm_where {
    int64_t row;
    int col, group;
    const uint4 *slot;
};

/* A row, as its threads see it. */
typedef struct {
    int64_t number;
    float rstd, slope; /* slope: mean(g h) rstd */
} lk_srms_norm_row;

/* Starts the copies of a thread's first Vecs vectors of a tensor into its slots. InL1: they go through L1. */
template <class Elem, int Num, bool InL1, int Vecs>
LK_DEVICE void lk_srms_norm_fetch(const lk_srms_norm_tensor &t, uint4 *slot, int64_t row, const lk_srms_norm_thread &at)
{
    if (!t.data) return;
    const Elem *from = (const Elem *)t.data + row * t.stride + at.first;
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        if (u * 32 >= at.count) break;
        LK_UNROLL for (int i = 0; i < Num / LK_VEC<Elem>; i++)
            lk_cp_async_16<InL1>(slot + t.part * Vecs * 32, (i * Vecs + u) * 512, from + u * 32 * Num + i * LK_VEC<Elem>);
    }
}
template <class T, class Res, class Dy, int Vecs>
LK_DEVICE void lk_srms_norm_fetch_row(const lk_srms_norm_input &in, uint4 *slot, int64_t row, const lk_srms_norm_thread &at)
{
    constexpr bool InL1 = sizeof(Dy) > sizeof(T); /* a lane copies both halves of each 32-byte sector of dy */
    lk_srms_norm_fetch<T, LK_VEC<T>, InL1, Vecs>(in.x, slot, row, at);
    lk_srms_norm_fetch<Res, LK_VEC<T>, InL1, Vecs>(in.r, slot, row, at);
    lk_srms_norm_fetch<Dy, LK_VEC<T>, InL1, Vecs>(in.dy, slot, row, at);
    lk_srms_norm_fetch<Res, LK_VEC<T>, InL1, Vecs>(in.dr, slot, row, at);
}

/* Num elements of a tensor. */
template <class Elem, int Num, int Copied>
LK_DEVICE void lk_srms_norm_get(float (&x)[Num], const lk_srms_norm_tensor &t, lk_srms_norm_where<Copied> where)
{
    if constexpr (Copied == 0) {
        lk_srms_norm_load(x, (const Elem *)t.data + where.row * t.stride + where.col);
    } else {
        lk_vec<Elem> raw[Num / LK_VEC<Elem>];
        LK_UNROLL for (int i = 0; i < Num / LK_VEC<Elem>; i++) raw[i].raw = where.slot[(t.part + i) * Copied * 32];
        lk_srms_norm_unpack<Elem, Num>(x, raw);
    }
}

/* s and dy, Num elements of each. Here and below, Reread is for any rows: a thread reads vectors beyond its first Vecs, and single
 * elements, twice, and their sums for dweight are in the workspace from the start. Without Reread the threads hold all elements
 * of a row, each at most one single element; dy is given, and s is one tensor. */
template <class T, class Res, class Dy, bool Reread, int Copied, int Num>
LK_DEVICE void lk_srms_norm_get_both(float (&s)[Num], float (&dy)[Num], const lk_srms_norm_input &in,
                                     lk_srms_norm_where<Copied> where)
{
    if constexpr (!Reread) {
        lk_srms_norm_get<Dy>(dy, in.dy, where);
        if (sizeof(Res) == sizeof(T) || in.x.data) lk_srms_norm_get<T>(s, in.x, where);
        else lk_srms_norm_get<Res>(s, in.r, where);
    } else {
        float x[Num];
        LK_UNROLL for (int j = 0; j < Num; j++) s[j] = x[j] = 0.0f, dy[j] = 1.0f;
        if (in.dy.data) lk_srms_norm_get<Dy>(dy, in.dy, where);
        if (in.r.data) lk_srms_norm_get<Res>(s, in.r, where);
        if (in.x.data) lk_srms_norm_get<T>(x, in.x, where);
        LK_UNROLL for (int j = 0; j < Num; j++) s[j] += x[j];
        lk_srms_norm_round<Res>(s, in);
    }
}

/* What a thread holds of the weight of Num elements: w as floats; but T where dy of float lies beside T of 16 bits, since registers
 * are too few for floats there (lk_srms_norm_packs_w). Reread holds nothing. */
template <class T, class Dy, bool Reread, int Num, bool Packed = !Reread && (sizeof(Dy) > sizeof(T))> struct lk_srms_norm_held_w {
    float w[Num];
};
template <class T, class Dy, int Num> struct lk_srms_norm_held_w<T, Dy, false, Num, true> {
    lk_vec<T> packed;
};
template <class T, class Dy, int Num> struct lk_srms_norm_held_w<T, Dy, true, Num, false> {};

/* Reads it; the Num elements begin at element `at` of weight. */
template <class T, class Dy, bool Reread, int Num>
LK_DEVICE void lk_srms_norm_hold_w(lk_srms_norm_held_w<T, Dy, Reread, Num> *held, const lk_srms_norm_call &call, int at)
{
    if constexpr (!Reread && sizeof(Dy) > sizeof(T)) {
        if (call.a.weight) held->packed = lk_load_vec_ca((const T *)call.a.weight + at);
    } else if constexpr (!Reread) {
        lk_srms_norm_load_w(held->w, call, at);
    }
}

/* g times w. */
template <class T, class Dy, bool Reread, int Num>
LK_DEVICE void lk_srms_norm_backward_weigh(float (&g)[Num], const lk_srms_norm_call &call,
                                           const lk_srms_norm_held_w<T, Dy, Reread, Num> &held, int at)
{
    if constexpr (Reread) {
        lk_srms_norm_apply(g, call, at);
    } else if constexpr (sizeof(Dy) > sizeof(T)) {
        if (call.a.weight) lk_srms_norm_apply<false>(g, held.packed, call.a.weight_offset);
    } else {
        LK_UNROLL for (int j = 0; j < Num; j++) g[j] *= held.w[j];
    }
}

/* The sums of g s over Num elements of a row and, where rstd is not given, of s^2. at: the first element's weight. */
template <class T, class Dy, bool Weight, bool Reread, int Num>
LK_DEVICE void lk_srms_norm_backward_sums(const lk_srms_norm_call &call, float (&sum)[2],
                                          const lk_srms_norm_held_w<T, Dy, Reread, Num> &w, int at, const float (&s)[Num],
                                          const float (&dy)[Num])
{
    float g[Num];
    LK_UNROLL for (int j = 0; j < Num; j++) g[j] = dy[j];
    if (Weight) lk_srms_norm_backward_weigh(g, call, w, at);
    sum[0] = lk_srms_norm_dot(s, g);
    sum[1] = call.a.rstd ? 0.0f : lk_srms_norm_dot(s, s);
}

/* Writes Num elements of dx and of dresidual. */
template <class T, class Res, int Num>
LK_DEVICE void lk_srms_norm_backward_store(const lk_srms_norm_call &call, int64_t row, int col, const float (&dx)[Num],
                                           const float (&dresidual)[Num])
{
    if (call.a.dx) lk_srms_norm_store((T *)call.a.dx + row * call.a.dx_stride + col, dx);
    if (call.a.dresidual) lk_srms_norm_store((Res *)call.a.dresidual + row * call.a.dresidual_stride + col, dresidual);
}

/* Writes Num elements of a row, and adds their terms to dweight's sums. g: dy. */
template <class T, class Res, class Dy, bool Weight, bool Reread, int Num, int Copied>
LK_DEVICE void lk_srms_norm_backward_put(const lk_srms_norm_call &call, lk_srms_norm_row row, float (&sums)[Num],
                                         const lk_srms_norm_held_w<T, Dy, Reread, Num> &w, lk_srms_norm_where<Copied> where,
                                         float (&s)[Num], float (&g)[Num])
{
    if (Weight) {
        LK_UNROLL for (int j = 0; j < Num; j++) sums[j] = fmaf(g[j] * row.rstd, s[j], sums[j]);
        lk_srms_norm_backward_weigh(g, call, w, where.group + where.col);
    }
    LK_UNROLL for (int j = 0; j < Num; j++) g[j] = row.rstd * fmaf(-s[j], row.slope, g[j]);
    if (call.in.dr.data) {
        lk_srms_norm_get<Res>(s, call.in.dr, where);
        LK_UNROLL for (int j = 0; j < Num; j++) g[j] += s[j];
    }
    lk_srms_norm_backward_store<T, Res>(call, row.number, where.col, g, g);
}

/* Adds Num elements of dy to their sums for dbias: one, or every four of them `step` elements behind the four before. */
template <class Dy, int Num, int Copied>
LK_DEVICE void lk_srms_norm_add_bias(float *bias, int step, const lk_srms_norm_input &in, lk_srms_norm_where<Copied> where)
{
    float dy[Num];
    LK_UNROLL for (int j = 0; j < Num; j++) dy[j] = 1.0f;
    if (in.dy.data) lk_srms_norm_get<Dy>(dy, in.dy, where);
    if constexpr (Num == 1) {
        *bias += dy[0];
    } else {
        LK_UNROLL for (int j = 0; j < Num; j += 4) {
            float4 *const four = (float4 *)(bias + j / 4 * step);
            const float4 sum = *four;
            *four = make_float4(sum.x + dy[j], sum.y + dy[j + 1], sum.z + dy[j + 2], sum.w + dy[j + 3]);
        }
    }
}

/* A team's row of the workspace, for dweight; and for dbias. A team's number is that of its first row. */
LK_DEVICE float *lk_srms_norm_partial(const lk_srms_norm_call &call, int64_t team, int Num)
{
    return (float *)call.a.workspace + team * call.pitch + lk_srms_norm_past(call.in, team, Num);
}
LK_DEVICE float *lk_srms_norm_bias_partial(const lk_srms_norm_call &call, int64_t team, int Num)
{
    return lk_srms_norm_partial(call, team, Num) + (call.a.dweight ? call.partials * call.pitch : 0);
}

/* Reread's elements that no thread holds. partial: the team's row of the workspace, with dweight's sums of these elements; bias:
 * its row with those of dbias. clear: each thread zeroes the sums that it will add to, also in a team without a row. sums: as
 * for held elements, but in short chains (see lk_srms_norm_total). put: writes the results and adds to partial and bias. */
template <int Num, int Vecs = LK_SRMS_NORM_BACKWARD_VECS>
LK_DEVICE void lk_srms_norm_rest_clear(float *partial, const lk_srms_norm_thread &at)
{
    for (int i = at.rank; i < at.edge; i += at.size) partial[lk_srms_norm_edge(at, i)] = 0.0f;
    for (int i = Vecs * 32; i < at.count; i += 32)
        for (int j = 0; j < Num; j++) partial[at.first + i * Num + j] = 0.0f;
}
template <class T, class Res, class Dy, bool Weight, int Num>
LK_DEVICE void lk_srms_norm_rest_sums(const lk_srms_norm_call &call, lk_srms_norm_total (&total)[2],
                                      lk_srms_norm_where<0> where)
{
    float more[2], s[Num], dy[Num];
    lk_srms_norm_get_both<T, Res, Dy, true>(s, dy, call.in, where);
    lk_srms_norm_backward_sums<T, Dy, Weight, true, Num>(call, more, {}, where.group + where.col, s, dy);
    lk_srms_norm_add(&total[0], more[0]), lk_srms_norm_add(&total[1], more[1]);
}
template <class T, class Res, class Dy, bool Weight, int Num>
LK_DEVICE void lk_srms_norm_rest_put(const lk_srms_norm_call &call, lk_srms_norm_row row, float *partial, float *bias,
                                     lk_srms_norm_where<0> where)
{
    const bool has_sums = Weight && call.a.dweight;
    float sums[Num], s[Num], dy[Num];
    partial += where.col;
    LK_UNROLL for (int j = 0; j < Num; j++) sums[j] = has_sums ? partial[j] : 0.0f;
    if (bias) lk_srms_norm_add_bias<Dy, Num>(bias + where.col, 4, call.in, where); /* before dx, which may be dy */
    lk_srms_norm_get_both<T, Res, Dy, true>(s, dy, call.in, where);
    lk_srms_norm_backward_put<T, Res, Dy, Weight, true, Num>(call, row, sums, {}, where, s, dy);
    LK_UNROLL for (int j = 0; j < Num; j++)
        if (has_sums) partial[j] = sums[j];
}

/* Writes the sums of a thread's vectors. */
template <int Vecs, int Num> LK_DEVICE void lk_srms_norm_put_sums(float *to, const float (&sums)[Vecs][Num], int count)
{
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        if (u * 32 >= count) break;
        LK_UNROLL for (int j = 0; j < Num; j += 4)
            *(float4 *)(to + u * 32 * Num + j) = make_float4(sums[u][j], sums[u][j + 1], sums[u][j + 2], sums[u][j + 3]);
    }
}

/* A thread's single element, unless Reread: its column, w and sums for dweight and dbias, in shared memory, since registers are
 * few; and of one row. */
typedef struct {
    int col;
    float w[1], sum, bias;
} lk_srms_norm_single_column;
typedef struct {
    float s, dy, dr;
} lk_srms_norm_single;

template <class T, class Res, class Dy>
LK_DEVICE lk_srms_norm_single lk_srms_norm_load_single(const lk_srms_norm_input &in, int64_t row, int col)
{
    const lk_srms_norm_where<0> where = {row, col, 0, NULL};
    float s[1], dy[1], dr[1] = {0.0f};
    lk_srms_norm_get_both<T, Res, Dy, false>(s, dy, in, where);
    if (in.dr.data) lk_srms_norm_get<Res>(dr, in.dr, where);
    return {s[0], dy[0], dr[0]};
}

/* A team owns a row. Weight: there is weight, dweight or dbias; a team owns every step-th row, all of one group, in which its
 * vectors are at the same columns, and copies its next row while it works on this one. Held: s and dy stay in registers. */
template <class T, class Res, class Dy, bool Weight, bool Reread, int Vecs = LK_SRMS_NORM_BACKWARD_VECS, bool Held = false>
LK_KERNEL void __launch_bounds__(Vecs == LK_SRMS_NORM_MANY_VECS ? LK_SRMS_NORM_MANY_THREADS(Held)
                                                                : LK_SRMS_NORM_BACKWARD_THREADS(Weight),
                                 Vecs == LK_SRMS_NORM_MANY_VECS || Reread ? 1 : 2)
    lk_srms_norm_backward_kernel(const __grid_constant__ lk_srms_norm_call call)
{
    constexpr int Num = LK_VEC<T>, Stages = LK_SRMS_NORM_BACKWARD_STAGES(Weight);
    LK_DYN_SMEM(lk_srms_norm_smem, smem);
    lk_srms_norm_thread at = lk_srms_norm_thread_of<T>(call.in, (int)call.a.cols);
    const int stage_size = call.in.parts * Vecs * 32;
    const int warp_size = Stages * stage_size + (Weight && call.a.dbias ? Vecs * Num / 4 * 32 : 0);
    uint4 *slots = smem.held + (int)threadIdx.x / 32 * warp_size + (int)threadIdx.x % 32;
    const int group = Weight ? lk_srms_norm_group_start(call, at.row) : 0; /* the same for all rows of the team */
    float sums[Weight ? Vecs : 1][Num] = {}, s[Held ? Vecs : 1][Num], dy[Held ? Vecs : 1][Num];
    lk_srms_norm_held_w<T, Dy, Reread, Num> w[Weight ? Vecs : 1];
    float *const bias = Weight && call.a.dbias ? (float *)(slots + Stages * stage_size) : NULL; /* sums for dbias */
    lk_cluster_begin();
    if (at.row < call.a.rows && at.count > 0) {
        lk_srms_norm_prefetch<T>(call.in.x, at);
        lk_srms_norm_prefetch<Res>(call.in.r, at);
        lk_srms_norm_prefetch<Dy>(call.in.dy, at);
        lk_srms_norm_prefetch<Res>(call.in.dr, at);
    }
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    if (Weight && Reread && call.a.dweight) lk_srms_norm_rest_clear<Num>(lk_srms_norm_partial(call, at.row, Num), at);
    if (Weight && Reread && bias) lk_srms_norm_rest_clear<Num>(lk_srms_norm_bias_partial(call, at.row, Num), at);
    for (int i = 0; bias && i < Vecs * Num / 4; i++) *(float4 *)(bias + i * 128) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (at.row < call.a.rows) lk_srms_norm_fetch_row<T, Res, Dy, Vecs>(call.in, slots, at.row, at);
    lk_cp_async_commit_group();
    LK_UNROLL for (int u = 0; Weight && u < Vecs; u++)
        if (u * 32 < at.count) lk_srms_norm_hold_w(&w[u], call, group + at.first + u * 32 * Num);
    const bool single = !Reread && at.rank < at.edge;
    LK_SHARED(lk_srms_norm_single_column, columns, [LK_SRMS_NORM_TEAM_THREADS]); /* of a larger block, threads 0 to 13 */
    lk_srms_norm_single_column *const column = &columns[threadIdx.x % LK_SRMS_NORM_TEAM_THREADS];
    if (single) *column = {lk_srms_norm_edge(at, at.rank), {1.0f}, 0.0f, 0.0f};
    if (Weight && single) lk_srms_norm_load_w(column->w, call, group + column->col);
    lk_cluster_ready();

    int number = 0;
    int64_t row = at.row;
    for (; row - at.team < call.a.rows; row += at.step, number++) {
        const bool owner = row < call.a.rows; /* lanes without a row still take part in the warp's reduction */
        const int count = owner ? at.count : 0;
        const uint4 *slot = slots + (Weight ? (number & 1) * stage_size : 0);
        if (Weight) {
            if (row + at.step < call.a.rows)
                lk_srms_norm_fetch_row<T, Res, Dy, Vecs>(call.in, slots + (~number & 1) * stage_size, row + at.step, at);
            lk_cp_async_commit_group();
        }
        lk_srms_norm_row here = {row, call.a.rstd && owner ? call.a.rstd[row] : 0.0f, 0.0f};
        float sum[2] = {0.0f, 0.0f}, more[2];
        if constexpr (Reread) {
            lk_srms_norm_total total[2] = {};
            for (int i = at.rank; owner && i < at.edge; i += at.size)
                lk_srms_norm_rest_sums<T, Res, Dy, Weight, 1>(call, total, {row, lk_srms_norm_edge(at, i), group, NULL});
            for (int i = Vecs * 32; i < count; i += 32)
                lk_srms_norm_rest_sums<T, Res, Dy, Weight, Num>(call, total, {row, at.first + i * Num, group, NULL});
            sum[0] = total[0].sum + total[0].chain, sum[1] = total[1].sum + total[1].chain;
        }
        lk_srms_norm_single one = {}; /* its line is in the L2 with the copies of this row */
        if (single && owner) one = lk_srms_norm_load_single<T, Res, Dy>(call.in, row, column->col);
        lk_cp_async_wait_group<Stages - 1>();
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            if (u * 32 >= count) break;
            const lk_srms_norm_where<Vecs> where = {row, at.first + u * 32 * Num, group, slot + u * 32};
            const int h = Held ? u : 0;
            lk_srms_norm_get_both<T, Res, Dy, Reread>(s[h], dy[h], call.in, where);
            lk_srms_norm_backward_sums<T, Dy, Weight, Reread, Num>(call, more, w[Weight ? u : 0], group + where.col, s[h], dy[h]);
            sum[0] += more[0], sum[1] += more[1];
        }
        if (single) sum[0] += one.s * (one.dy * column->w[0]), sum[1] += one.s * one.s;
        lk_srms_norm_sum(call.in, sum, number, call.a.rstd);

        if (!call.a.rstd) here.rstd = lk_rsqrt(fmaf(sum[1], call.in.inverse_cols, call.a.eps));
        here.slope = sum[0] * here.rstd * call.in.inverse_cols * here.rstd;
        if (single && owner) {
            column->sum = fmaf(one.dy * here.rstd, one.s, column->sum), column->bias += one.dy;
            const float ds[1] = {here.rstd * fmaf(-one.s, here.slope, one.dy * column->w[0]) + one.dr};
            lk_srms_norm_backward_store<T, Res>(call, row, column->col, ds, ds);
        }
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            if (u * 32 >= count) break;
            const lk_srms_norm_where<Vecs> where = {row, at.first + u * 32 * Num, group, slot + u * 32};
            const int h = Held ? u : 0;
            if (!Held) lk_srms_norm_get_both<T, Res, Dy, Reread>(s[h], dy[h], call.in, where);
            lk_srms_norm_backward_put<T, Res, Dy, Weight, Reread>(call, here, sums[Weight ? u : 0], w[Weight ? u : 0], where, s[h],
                                                                  dy[h]);
        }
        LK_NO_UNROLL for (int u = 0; u < Vecs; u++) { /* the loop above has no register left */
            if (!bias || u * 32 >= count) break;
            lk_srms_norm_add_bias<Dy, Num, Vecs>(bias + u * Num / 4 * 128, 128, call.in, {row, 0, 0, slot + u * 32});
        }
        if constexpr (Reread) {
            const int64_t team = row - (int64_t)number * at.step;
            float *const partial = Weight ? lk_srms_norm_partial(call, team, Num) : NULL;
            float *const to_bias = bias ? lk_srms_norm_bias_partial(call, team, Num) : NULL;
            for (int i = Vecs * 32; i < count; i += 32)
                lk_srms_norm_rest_put<T, Res, Dy, Weight, Num>(call, here, partial, to_bias, {row, at.first + i * Num, group, NULL});
            for (int i = at.rank; owner && i < at.edge; i += at.size)
                lk_srms_norm_rest_put<T, Res, Dy, Weight, 1>(call, here, partial, to_bias,
                                                             {row, lk_srms_norm_edge(at, i), group, NULL});
        }
        if (!Weight) break;
    }
    const int64_t team = row - (int64_t)number * at.step; /* one without rows writes zeros */
    if (Weight && bias) {
        float *const partial = lk_srms_norm_bias_partial(call, team, Num);
        if (single) partial[column->col] = column->bias;
        LK_UNROLL for (int i = 0; i < Vecs * Num / 4; i++)
            if (i * 4 / Num * 32 < at.count)
                *(float4 *)(partial + at.first + i * 4 / Num * 32 * Num + i * 4 % Num) = *(const float4 *)(bias + i * 128);
    }
    if (!Weight || !call.a.dweight) return;
    float *const partial = lk_srms_norm_partial(call, team, Num);
    if (single) partial[column->col] = column->sum;
    lk_srms_norm_put_sums(partial + at.first, sums, at.count);
}

/* ---- Backward of few rows ------------------------------------------------------------------------------------------------ */

/* Few rows, as in forward, without dweight and dbias. */
template <class T, class Res>
LK_KERNEL void __launch_bounds__(LK_SRMS_NORM_THREADS)
    lk_srms_norm_backward_few_kernel(const __grid_constant__ lk_srms_norm_call call)
{
    constexpr int Vecs = LK_SRMS_NORM_FEW_VECS, Num = LK_VEC<T>, Parts = Num / LK_VEC<Res>;
    const lk_srms_norm_input &in = call.in;
    const lk_srms_norm_thread at = lk_srms_norm_few_thread<T>((int)call.a.cols);
    const int64_t row = at.row;
    if (at.count > 0) {
        lk_srms_norm_prefetch<T>(in.dy, at);
        lk_srms_norm_prefetch<T>(in.x, at);
        lk_srms_norm_prefetch<T>({call.a.weight, 0, 0}, at);
        lk_srms_norm_prefetch<Res>(in.r, at);
        lk_srms_norm_prefetch<Res>(in.dr, at);
    }
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();

    lk_vec<T> weight[Vecs][1], x[Vecs][1], dy[Vecs][1];
    lk_vec<Res> r[Vecs][Parts], dr[Vecs][Parts];
    float rstd = call.a.rstd ? call.a.rstd[row] : 0.0f;
    lk_srms_norm_load_raw(dy, in.dy, row, at.first, at.count);
    lk_srms_norm_load_raw(x, in.x, row, at.first, at.count);
    lk_srms_norm_load_raw(weight, {call.a.weight, 0, 0}, 0, at.first, at.count);
    lk_srms_norm_load_raw(r, in.r, row, at.first, at.count);
    lk_srms_norm_load_raw(dr, in.dr, row, at.first, at.count);
    float s[Vecs][Num], g[Vecs][Num], sum[2] = {0.0f, 0.0f};
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        lk_srms_norm_add<T, Res>(s[u], in, x[u], r[u]);
        LK_UNROLL for (int j = 0; j < Num; j++) g[u][j] = 1.0f;
        if (in.dy.data) lk_unpack(g[u], dy[u][0]);
        if (call.a.weight) lk_srms_norm_apply<false>(g[u], weight[u][0], call.a.weight_offset);
        if (u * 32 < at.count) sum[0] += lk_srms_norm_dot(s[u], g[u]), sum[1] += lk_srms_norm_dot(s[u], s[u]);
    }
    lk_sum_cluster<2, true>(sum, 0);

    if (!call.a.rstd) rstd = lk_rsqrt(fmaf(sum[1], in.inverse_cols, call.a.eps));
    const float slope = sum[0] * rstd * in.inverse_cols * rstd;
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        if (u * 32 >= at.count) break;
        float add[Num] = {};
        if (in.dr.data) lk_srms_norm_unpack<Res, Num>(add, dr[u]);
        LK_UNROLL for (int j = 0; j < Num; j++) g[u][j] = fmaf(rstd, fmaf(-s[u][j], slope, g[u][j]), add[j]);
        lk_srms_norm_backward_store<T, Res>(call, row, at.first + u * 32 * Num, g[u], g[u]);
    }
}

/* ---- Backward of short rows ---------------------------------------------------------------------------------------------- */

/* Short rows, where s and dy are one tensor of T each and dx is all that is written of a row. Weight: there is weight or dweight. A
 * team has every step-th row, all of one group. Where a block has whole sets of groups it adds up its teams' sums for dweight. */
template <class T, bool Weight>
LK_KERNEL void __launch_bounds__(LK_SRMS_NORM_SHORT_THREADS, LK_SRMS_NORM_SHORT_BLOCKS(T))
    lk_srms_norm_backward_short_kernel(const __grid_constant__ lk_srms_norm_call call)
{
    constexpr int Num = LK_VEC<T>, Rows = LK_SRMS_NORM_SHORT_ROWS;
    const lk_srms_norm_args &a = call.a;
    const lk_srms_norm_tensor &of_s = call.in.x, &of_dy = call.in.dy;
    const int lanes = 1 << call.in.team_log2, teams = (int)blockDim.x >> call.in.team_log2, groups = (int)a.groups;
    const int team = (int)threadIdx.x >> call.in.team_log2, col = ((int)threadIdx.x & (lanes - 1)) * Num, cols = (int)a.cols;
    const int64_t first = (int64_t)blockIdx.x * teams + team;
    const int step = (int)gridDim.x * teams;
    LK_SHARED(float, shared, [Weight ? LK_SRMS_NORM_SHORT_THREADS * Num : 1]);
    float w[Num], sums[1][Num] = {};
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    if (Weight && col < cols) lk_srms_norm_load_w(w, call, lk_srms_norm_group_start(call, first) + col);
    for (int64_t row = first; row - team < a.rows; row += (int64_t)Rows * step) { /* lanes without a row take part in the reduction */
        lk_vec<T> x[Rows] = {}, dy[Rows] = {};
        float rstd[Rows], sum[Rows], squares[Rows], s[Num], g[Num];
        LK_UNROLL for (int u = 0; u < Rows; u++) {
            const int64_t at = row + (int64_t)u * step;
            rstd[u] = 0.0f;
            if (col >= cols || at >= a.rows) continue;
            x[u] = lk_load_vec_ca((const T *)of_s.data + at * of_s.stride + col);
            dy[u] = lk_load_vec_ca((const T *)of_dy.data + at * of_dy.stride + col);
            if (a.rstd) rstd[u] = a.rstd[at];
        }
        LK_UNROLL for (int u = 0; u < Rows; u++) {
            lk_unpack(s, x[u]), lk_unpack(g, dy[u]);
            LK_UNROLL for (int j = 0; j < Num && Weight; j++) g[j] *= w[j];
            sum[u] = col < cols ? lk_srms_norm_dot(s, g) : 0.0f;
            squares[u] = a.rstd ? 0.0f : lk_srms_norm_dot(s, s);
        }
        LK_UNROLL for (int u = 0; u < Rows; u++) sum[u] = lk_sum_warp(sum[u], lanes);
        if (!a.rstd) {
            LK_UNROLL for (int u = 0; u < Rows; u++)
                rstd[u] = lk_rsqrt(fmaf(lk_sum_warp(squares[u], lanes), call.in.inverse_cols, a.eps));
        }
        LK_UNROLL for (int u = 0; u < Rows; u++) {
            const int64_t at = row + (int64_t)u * step;
            if (col >= cols || at >= a.rows) continue;
            const float slope = sum[u] * rstd[u] * call.in.inverse_cols * rstd[u];
            lk_forget(&x[u].raw), lk_forget(&dy[u].raw); /* or their floats stay in registers too */
            lk_unpack(s, x[u]), lk_unpack(g, dy[u]);
            LK_UNROLL for (int j = 0; j < Num; j++) {
                if (Weight) sums[0][j] = fmaf(g[j] * rstd[u], s[j], sums[0][j]), g[j] *= w[j];
                g[j] = rstd[u] * fmaf(-s[j], slope, g[j]);
            }
            lk_srms_norm_backward_store<T, T>(call, at, col, g, g);
        }
    }
    if (!Weight || !a.dweight) return;
    if (teams % groups) { /* uniform */
        if (col < cols) lk_srms_norm_put_sums(lk_srms_norm_partial(call, first, Num) + col, sums, 1);
        return;
    }
    float *const mine = shared + (int)threadIdx.x * Num;
    LK_UNROLL for (int j = 0; j < Num; j++) mine[j] = sums[0][j];
    __syncthreads(); /* all teams' sums are written before a set's first ones add them */
    if (team >= groups || col >= cols) return;
    for (int other = team + groups; other < teams; other += groups)
        LK_UNROLL for (int j = 0; j < Num; j++) sums[0][j] += mine[(other - team) * lanes * Num + j];
    lk_srms_norm_put_sums(lk_srms_norm_partial(call, (int64_t)blockIdx.x * groups + team, Num) + col, sums, 1);
}

/* The greatest one. */
LK_HOST int64_t lk_srms_norm_common_divisor(int64_t a, int64_t b)
{
    return b ? lk_srms_norm_common_divisor(b, a % b) : a;
}

/* The least one: so many rows on, each of `teams` teams comes to a row of the same group. */
LK_HOST int64_t lk_srms_norm_common_multiple(int64_t groups, int64_t teams)
{
    return groups / lk_srms_norm_common_divisor(groups, teams) * teams;
}

/* Whether these are short rows that the kernel takes; then lays out its blocks, as many as run at once. */
template <class T>
LK_HOST bool lk_srms_norm_backward_are_short(const lk_device *device, const lk_srms_norm_args *a, lk_srms_norm_layout *layout)
{
    constexpr int Num = LK_VEC<T>;
    lk_srms_norm_call *const call = &layout->call;
    const bool one = call->in.x.data && !call->in.r.data && !call->in.dr.data && !a->dresidual;
    const bool plain = one && a->dy && a->dy_dtype == lk_dtype<T> && !a->dbias;
    const int64_t most = (int64_t)LK_SRMS_NORM_SHORT_BLOCKS(T) * device->sms;
    if (!plain || call->in.team_log2 < 0) return false;
    const int64_t teams = LK_SRMS_NORM_SHORT_THREADS >> call->in.team_log2;
    const int64_t sets = a->groups / lk_srms_norm_common_divisor(a->groups, teams); /* of blocks, with rows of all groups */
    const int64_t blocks = lk_ceil_div(a->rows, teams * LK_SRMS_NORM_SHORT_ROWS);
    if (sets > most || sets > blocks || !lk_srms_norm_are_short<T>(device, a, layout)) return false;
    if (layout->grid > most) layout->grid = most;
    if (a->weight || a->dweight) {
        layout->grid -= layout->grid % sets;
        call->pitch = lk_ceil_div(a->cols, Num) * Num + Num;
        call->partials = layout->grid * (teams % a->groups ? teams : a->groups);
        if (a->dweight) layout->workspace = (size_t)(call->partials * call->pitch) * sizeof(float);
    }
    return true;
}

/* ---- Sums over teams: dweight and dbias ---------------------------------------------------------------------------------- */

/* Sums over rows of the workspace. Group g's are rows g, g + groups, ...: `each` of them, and one more in the first `more` groups.
 * Row r starts (past + r past_step) modulo (past_mask + 1) elements behind r pitch. */
typedef struct {
    const float *from;
    void *to[2]; /* [groups, cols]; the second one's rows lie `next` elements behind those of the first; NULL: there is none */
    int to_dtype, accumulate;
    int64_t each, more, cols, pitch, groups, next;
    int past, past_step, past_mask;
} lk_srms_norm_row_sum;

/* A block owns 32 columns of a group of a result, and a lane one of them. Each of its 32 warps adds every 32nd row of the group. */
LK_KERNEL void __launch_bounds__(1024) lk_srms_norm_row_sum_kernel(const __grid_constant__ lk_srms_norm_row_sum call)
{
    LK_SHARED(float, sums, [1024]);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int results = call.to[1] ? 2 : 1, result = (int)blockIdx.x % results, block = (int)blockIdx.x / results;
    const int groups = (int)call.groups, group = block % groups;
    const int64_t col = (int64_t)(block / groups) * 32 + lane, first = group + call.groups * warp;
    const int64_t rows = call.each + (group < call.more), step = 32 * call.groups * call.pitch;
    const int past = (int)((unsigned)call.past + (unsigned)first * (unsigned)call.past_step) & call.past_mask; /* in all its rows */
    const float *from = call.from + past + col + first * call.pitch + result * call.next;
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    float sum = 0.0f;
    if (col < call.cols) { /* not in the loop's condition, which would make each load wait for the one before */
        LK_UNROLL_BY(8) for (int64_t row = warp; row < rows; row += 32, from += step) sum += *from;
    }
    sums[threadIdx.x] = sum;
    __syncthreads(); /* all sums are written before the first warp adds them */
    if (warp > 0 || col >= call.cols) return;
    float quarter[4] = {};
    LK_UNROLL for (int i = 0; i < 32; i++) quarter[i % 4] += sums[i * 32 + lane];
    sum = (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
    const int64_t out = group * call.cols + col;
    void *const to = call.to[result];
    lk_put_as(to, call.to_dtype, out, call.accumulate ? lk_get_as(to, call.to_dtype, out) + sum : sum);
}

LK_HOST lk_status lk_srms_norm_sum_rows(const char *op, const lk_device *device, const lk_srms_norm_row_sum &sum,
                                        cudaStream_t stream)
{
    const int64_t blocks = lk_ceil_div(sum.cols, 32) * sum.groups * (sum.to[1] ? 2 : 1);
    return lk_launch_pdl(op, device, lk_srms_norm_row_sum_kernel, blocks, 1, 1024, 0, stream, sum);
}

/* ---- The launch of backward ---------------------------------------------------------------------------------------------- */

/* Whether the weight of all vectors is of T, on 16 bytes, or NULL. */
template <class T> LK_HOST bool lk_srms_norm_packs_w(const lk_srms_norm_args *a, const lk_srms_norm_input *in)
{
    const bool starts = !in->offset && !in->offset_step && (uintptr_t)a->weight % 16 == 0;
    return !a->weight || (a->weight_dtype == lk_dtype<T> && starts && (a->groups == 1 || a->cols % LK_VEC<T> == 0));
}

/* Persistent blocks, as many as fit, and the workspace. sums: how many of dweight and dbias are wanted. sm_threads: per SM. */
template <class T> LK_HOST void lk_srms_norm_backward_fill(const lk_device *device, const lk_srms_norm_args *a, int sums,
                                                           int sm_threads, lk_srms_norm_layout *layout)
{
    constexpr int Num = LK_VEC<T>;
    lk_srms_norm_call *const call = &layout->call;
    lk_srms_norm_input *const in = &call->in;
    int64_t teams = in->team_log2 < 0 ? 1 : layout->threads >> in->team_log2; /* of a block */
    /* From a team's row to its next one is an int in the kernels. A block of one team has no more than groups, 2^30. */
    if (a->rows > INT32_MAX - teams && lk_srms_norm_common_multiple(a->groups, teams) > INT32_MAX)
        in->team_log2 = 5, layout->threads = 32, teams = 1;
    call->pitch = lk_ceil_div(a->cols, Num) * Num + Num; /* vectors, and the elements before the first */
    const int64_t fit = device->smem * 1024 / ((int64_t)layout->smem + 8 * 1024); /* static shared memory and the system's */
    const int64_t by_smem = fit > 1 ? fit : 1;
    const int64_t resident = sm_threads / layout->threads;
    const int64_t most = (resident < by_smem ? resident : by_smem) * device->sms;
    const int64_t cap = ((int64_t)64 << 20) / (4 * call->pitch) + 2; /* 64 MiB and two rows */
    int64_t blocks = layout->grid / layout->cluster;
    if (layout->grid > most) blocks = lk_ceil_div(most, layout->cluster);
    if (sums && blocks * teams > cap) blocks = cap / teams;
    const int64_t turn = a->groups / lk_srms_norm_common_divisor(a->groups, teams); /* a team has rows of one group */
    int64_t period = in->offset_step ? turn * lk_ceil_div(Num, teams) : turn; /* every Num-th row starts at the same offset */
    if (blocks * teams < a->rows && blocks < period) in->aligned = period == turn && in->aligned, period = turn;
    if (blocks * teams < a->rows) blocks = blocks < period ? period : blocks - blocks % period;
    if (blocks * teams > a->rows) blocks = lk_ceil_div(a->rows, teams);
    layout->grid = blocks * layout->cluster;
    call->partials = blocks * teams;
    layout->workspace = (size_t)(sums * call->partials * call->pitch) * sizeof(float);
}

/* The launch for checked arguments, with so many vectors in a thread. */
template <class T>
LK_HOST lk_srms_norm_layout lk_srms_norm_backward_lay_out(const lk_device *device, lk_srms_norm_args *a, int vecs)
{
    constexpr int Num = LK_VEC<T>;
    const bool many = vecs == LK_SRMS_NORM_MANY_VECS, held = a->dresidual_out || a->residual_dtype != lk_dtype<T>;
    const bool weight = a->weight || a->dweight || a->dbias;
    const bool few = !a->dweight && !a->dbias && lk_srms_norm_plain<T>(a, a->weight) && a->dy_dtype == lk_dtype<T>;
    const int few_rows_limit = few ? 256 : 0; /* see forward */
    const int part_bytes = 16 * vecs * LK_SRMS_NORM_BACKWARD_STAGES(weight), sums = (a->dweight != NULL) + (a->dbias != NULL);
    const int bias_bytes = a->dbias ? LK_SRMS_NORM_BIAS_BYTES(T) : 0;
    const lk_srms_norm_traits traits = {vecs, vecs, part_bytes, bias_bytes, LK_SRMS_NORM_BACKWARD_THREADS(weight),
                                        LK_SRMS_NORM_TEAM_THREADS, 1, few_rows_limit};
    lk_srms_norm_layout layout = lk_srms_norm_lay_out<T>(device, a, true, traits);
    lk_srms_norm_input *const in = &layout.call.in;
    lk_srms_norm_backward_are_short<T>(device, a, &layout);
    layout.smem = sizeof(lk_srms_norm_smem) + (size_t)((part_bytes * in->parts + bias_bytes) * layout.threads);
    if (layout.few || layout.short_rows) layout.smem = 0;
    else if (weight && a->rows > 0)
        lk_srms_norm_backward_fill<T>(
            device, a, sums, many ? LK_SRMS_NORM_MANY_THREADS(held) : 2 * LK_SRMS_NORM_BACKWARD_THREADS(true), &layout);
    const bool holds_row = in->aligned && in->warp_span <= 32 * vecs &&
                           (in->team_log2 < 0 || lk_ceil_div(a->cols, Num) <= (int64_t)vecs << in->team_log2);
    const bool one = !in->x.data || !in->r.data; /* s is one tensor */
    layout.reread = !(holds_row && a->dy && one && (a->dy_dtype == lk_dtype<T> || lk_srms_norm_packs_w<T>(a, in)));
    if (!layout.few && !layout.reread && !in->x.data && a->residual_dtype == lk_dtype<T>)
        in->x = in->r, in->r.data = NULL; /* of the same type */
    layout.many = many && !layout.reread, layout.held = held;
    return layout;
}
template <class T> LK_HOST lk_srms_norm_layout lk_srms_norm_backward_lay_out(const lk_device *device, lk_srms_norm_args *a)
{
    const lk_srms_norm_layout layout = lk_srms_norm_backward_lay_out<T>(device, a, LK_SRMS_NORM_BACKWARD_VECS);
    const bool persistent = a->dweight && !a->dbias && !layout.reread && !layout.few && !layout.short_rows;
    if (!persistent || a->dy_dtype != lk_dtype<T> || a->rows <= 4 * layout.call.partials) return layout;
    const lk_srms_norm_layout many = lk_srms_norm_backward_lay_out<T>(device, a, LK_SRMS_NORM_MANY_VECS);
    return many.many && many.cluster == 1 ? many : layout; /* clusters are faster with 4 vectors */
}

/* Res, Dy: the types of residual and dy. */
template <class T, class Res, class Dy>
LK_HOST void (*lk_srms_norm_backward_choose_of(const lk_srms_norm_layout &layout))(lk_srms_norm_call)
{
    const bool reread = layout.reread;
    if (layout.few) return lk_srms_norm_backward_few_kernel<T, Res>;
    if constexpr (sizeof(Dy) == sizeof(T)) {
        constexpr int Many = LK_SRMS_NORM_MANY_VECS;
        if (layout.many)
            return sizeof(Res) > sizeof(T) || layout.held ? lk_srms_norm_backward_kernel<T, Res, Dy, true, false, Many, true>
                                                          : lk_srms_norm_backward_kernel<T, T, Dy, true, false, Many, false>;
        if (layout.short_rows)
            return layout.call.a.weight || layout.call.a.dweight ? lk_srms_norm_backward_short_kernel<T, true>
                                                                 : lk_srms_norm_backward_short_kernel<T, false>;
    }
    if (layout.call.a.weight || layout.call.a.dweight || layout.call.a.dbias)
        return reread ? lk_srms_norm_backward_kernel<T, Res, Dy, true, true> : lk_srms_norm_backward_kernel<T, Res, Dy, true, false>;
    return reread ? lk_srms_norm_backward_kernel<T, Res, Dy, false, true> : lk_srms_norm_backward_kernel<T, Res, Dy, false, false>;
}
template <class T, class Res> LK_HOST void (*lk_srms_norm_backward_choose(const lk_srms_norm_layout &layout))(lk_srms_norm_call)
{
    return layout.call.a.dy_dtype == lk_dtype<T> ? lk_srms_norm_backward_choose_of<T, Res, T>(layout)
                                                 : lk_srms_norm_backward_choose_of<T, Res, float>(layout);
}

/* ---- Checks -------------------------------------------------------------------------------------------------------------- */

/* Validates; a becomes the arguments with every default filled in, the types too. device: as in lk_check_begin. */
template <class T>
LK_HOST lk_status lk_srms_norm_check(const char *op, const lk_srms_norm_args *args, lk_direction direction, lk_device *device,
                                     lk_srms_norm_args *a, bool gated = false)
{
    *a = *args;
    const bool backward = direction == LK_BACKWARD;
    if (a->groups == 0) a->groups = 1;
    if (backward) a->batch_invariant = 0;
    if (backward && a->residual_out && a->residual_out == a->residual && !a->residual_out_stride)
        a->residual_out_stride = a->residual_stride; /* forward wrote it in place, by this struct */
    lk_srms_norm_table table = lk_srms_norm_tensors<T>(a, backward, gated);
    lk_tensor *const list = table.list;
    const int count = lk_used_tensors(list, LK_COUNT(table.list));
    lk_checks checks = lk_check_begin(op, device);
    lk_check_size(&checks, "rows", a->rows, 0, INT64_MAX);
    lk_check_size(&checks, "cols", a->cols, 1, (int64_t)1 << 30);
    const int64_t by_cols = ((int64_t)1 << 30) / (a->cols > 0 ? a->cols : 1);
    const int64_t by_sums = (int64_t)1 << (backward && a->dweight && a->dbias ? 29 : 30); /* a grid has fewer than 2^31 blocks */
    lk_check_size(&checks, "groups", a->groups, 0, by_cols < by_sums ? by_cols : by_sums);
    lk_check_shapes(&checks, list, count, !device);
    lk_check_number(&checks, "eps", a->eps, a->eps >= 0.0f && a->eps <= FLT_MAX, "finite and at least 0");
    lk_check_number(&checks, "weight_offset", a->weight_offset, fabsf(a->weight_offset) <= FLT_MAX, "finite");
    lk_check_dtype<T>(&checks, "residual_dtype", a->residual_dtype);
    if (backward) lk_check_dtype<T>(&checks, "dy_dtype", a->dy_dtype);
    lk_check_enum(&checks, "weight_dtype", a->weight_dtype, LK_DTYPE_BF16, "LK_DTYPE_*");
    if (backward) lk_check_enum(&checks, "dweight_dtype", a->dweight_dtype, LK_DTYPE_BF16, "LK_DTYPE_*");
    lk_check_enum(&checks, "path", a->path, LK_SRMS_NORM_CLUSTER, "LK_SRMS_NORM_*");
    if (!a->residual_dtype) a->residual_dtype = lk_dtype<T>;
    if (!a->dy_dtype) a->dy_dtype = lk_dtype<T>;
    if (!a->weight_dtype) a->weight_dtype = lk_dtype<T>;
    if (!a->dweight_dtype) a->dweight_dtype = lk_dtype<T>;
    lk_check_rows(&checks, a->path, a->path >= LK_SRMS_NORM_BLOCK && a->rows > LK_TEAM_ROWS, "rows", a->rows);
    lk_check_invariant(&checks, a->batch_invariant && a->rows > LK_TEAM_ROWS, a->rows);
    lk_check_cluster(&checks, a->path, a->path == LK_SRMS_NORM_CLUSTER && checks.arch < 90);
    lk_check_end(&checks, list, count);
    lk_check_warn(&checks, a->rows == 0, backward ? "rows is 0; only dweight and dbias are written, if they are given"
                                                  : "rows is 0; nothing is computed");
    lk_check_warn(&checks, a->eps == 0.0f && !(backward && a->rstd), "eps is 0; a row of zeros gives NaN");
    return checks.status;
}

/* ---- The calls, and the workspace ---------------------------------------------------------------------------------------- */

/* teams: those that have the rows among them; 0: there is one for each row. */
template <class T>
LK_HOST lk_status lk_srms_norm_backward_launch(const char *op, const lk_device *device, const lk_srms_norm_args &a,
                                               const lk_srms_norm_layout &layout, void (*kernel)(lk_srms_norm_call),
                                               cudaStream_t stream, int64_t teams)
{
    lk_checks checks = {op, LK_OK};
    lk_check_workspace(&checks, a.workspace, a.workspace_bytes, layout.workspace);
    lk_status status = checks.status;
    /* Persistent blocks of many rows start when the previous kernel has ended: see lk_launch_blocks. */
    const bool pdl = device->arch >= 90 && (teams == 0 || a.rows <= 4 * teams);
    if (!status && a.rows > 0)
        status = lk_launch_blocks(op, pdl, kernel, layout.grid, layout.cluster, layout.threads, layout.smem, stream, layout.call);
    if (status || !(a.dweight || a.dbias)) return status;
    const int64_t partials = layout.call.partials, pitch = layout.call.pitch;
    const lk_srms_norm_row_sum sum = {(const float *)a.workspace, {a.dweight ? a.dweight : a.dbias, a.dweight ? a.dbias : NULL},
                                      a.dweight_dtype, a.accumulate,
                                      partials / a.groups, partials % a.groups, a.cols, pitch, a.groups, partials * pitch,
                                      layout.call.in.offset, layout.call.in.offset_step, LK_VEC<T> - 1};
    return lk_srms_norm_sum_rows(op, device, sum, stream);
}

template <class T>
LK_HOST lk_status lk_srms_norm_backward(const char *op, const lk_device *device, lk_srms_norm_args a, cudaStream_t stream)
{
    const lk_srms_norm_layout layout = lk_srms_norm_backward_lay_out<T>(device, &a);
    const bool other = a.residual_dtype != lk_dtype<T>;
    void (*const kernel)(lk_srms_norm_call) =
        other ? lk_srms_norm_backward_choose<T, float>(layout) : lk_srms_norm_backward_choose<T, T>(layout);
    return lk_srms_norm_backward_launch<T>(op, device, a, layout, kernel, stream, layout.call.partials);
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_srms_norm_run(const char *op, const lk_srms_norm_args *args, cudaStream_t stream)
{
    lk_srms_norm_args a = {};
    lk_device device = {};
    const lk_status status = lk_srms_norm_check<T>(op, args, direction, &device, &a);
    if (status) return status;
    if constexpr (direction == LK_BACKWARD) return lk_srms_norm_backward<T>(op, &device, a, stream);
    else return a.rows == 0 ? LK_OK : lk_srms_norm_forward_rows<T>(op, &device, &a, stream);
}

/* Backward's bytes, for checked arguments. With x or residual_out the answer is for the tensors that are given. With neither it is
 * the most for any tensors: s from x, from x and residual or from residual_out; each other tensor given or not (an output in place
 * counts as not given); all on 16 bytes, all off by one element, or not aligned to each other. */
template <class T>
LK_HOST lk_status lk_srms_norm_ask(const char *op, const lk_srms_norm_args &given,
                                   lk_srms_norm_layout (*lay_out)(const lk_device *, lk_srms_norm_args *), size_t *bytes)
{
    lk_device device = {};
    if (!(given.dweight || given.dbias) || given.rows == 0) return lk_no_workspace(LK_OK, bytes);
    const lk_status status = lk_asked_device(op, lk_current_device(&device));
    if (status) return status;
    const bool known = given.x || given.residual_out;
    size_t most = 0;
    for (int i = 0; i < (known ? 1 : 4 * 3 * 16); i++) {
        lk_srms_norm_args a = given;
        if (!known) {
            const int source = i % 4, shift = i / 4 % 3, which = i / 12; /* 3: forward wrote s over residual */
            const int element = shift ? (int)sizeof(T) : 0, residual = shift ? lk_dtype_bytes<T>(given.residual_dtype) : 0;
            char *const address = (char *)(uintptr_t)4096;
            a.x = source < 2 ? address + element : NULL;
            a.residual = source == 1 ? address + residual : NULL;
            a.residual_out = source >= 2 ? address + residual : NULL;
            if (source == 3) a.residual_out_stride = a.residual_stride;
            a.dy = which & 1 ? address + (shift ? lk_dtype_bytes<T>(given.dy_dtype) : 0) : NULL;
            a.dresidual_out = which & 2 ? address + residual : NULL;
            a.dx = which & 4 ? address + 4096 + (shift == 1 ? element : 0) : NULL; /* not in place of dy */
            a.dresidual = which & 8 ? address + 4096 + (shift == 1 ? residual : 0) : NULL;
        }
        const size_t needed = lay_out(&device, &a).workspace;
        if (needed > most) most = needed;
    }
    if (bytes) *bytes = most;
    return LK_OK;
}

/* Forward has none. */
template <class T>
LK_HOST lk_status lk_srms_norm_query(const char *op, const lk_srms_norm_args *args, lk_direction direction, size_t *bytes)
{
    lk_srms_norm_args given = {};
    const lk_status status = lk_srms_norm_check<T>(op, args, direction, NULL, &given);
    if (status || direction == LK_FORWARD) return lk_no_workspace(status, bytes);
    return lk_srms_norm_ask<T>(op, given, lk_srms_norm_backward_lay_out<T>, bytes);
}

#endif /* CUDA or the simulator */
#endif

// SPDX-License-Identifier: MIT
/* lk_head.cuh - a language model's head without all of its logits: x weight^T for a chunk of tokens or a panel of columns at a
 * time, and dx, dweight and dbias from what a loss makes of these logits. It knows no loss.
 *
 *   logits[t,j]  = sum_d x[t,d] weight[j,d] + bias[j]
 *   dx[t,d]      = sum_j dZ[t,j] weight[j,d]
 *   dweight[j,d] = sum_t dZ[t,j] x[t,d]        with accumulate added to its old contents
 *   dbias[j]     = sum_t dZ[t,j]               likewise
 *
 *   how a call is done   lk_head_plan.cuh: chunks, panels, slices, and the arrays of the workspace
 *   what follows here    the matmuls; rows that are compacted; sums in f32 that become 16 bits; CHUNKS and PANELS
 *   FUSED                lk_head_sm90.cuh, which includes this file
 *   the rows             lk_head_rows: a table of host functions, which each loss fills in
 *
 * An op checks its arguments, begins a plan (lk_head_plan_begin, lk_head_choose), lays out its workspace (lk_head_lay_out), sets a
 * job and runs it: lk_head_run. linear_cross_entropy.cuh does so in lk_lce_launch.
 *
 * Needs: lk_base.cuh, lk_check.cuh, lk_cublas.cuh, lk_head_plan.cuh, lk_move.cuh, lk_ptx.cuh, lk_ranks.cuh; cuBLASLt.
 */
#ifndef LK_HEAD_CUH
#define LK_HEAD_CUH

#include "lk_cublas.cuh"
#include "lk_head_plan.cuh"
#include "lk_move.cuh"
#include "lk_ranks.cuh"

#if defined(__CUDACC__) || defined(LK_SIMT)

/* ---- What a head asks ---------------------------------------------------------------------------------------------------- */

/* Call is the op's own struct of a call. Kernels get it whole, with what their loss needs. The steps here read `a` of it, the op's
 * arguments with defaults filled in, of the type Call::args:
 *   a.context, a.tokens, a.hidden, a.vocab, a.accumulate, a.dweight_dtype
 *   a.x, a.weight, a.bias, a.dx, a.dweight, a.dbias, and strides of x, weight, dx and dweight
 * All else about the call is in lk_head_shape. FUSED reads more of both, the options of cross entropy too. */

/* The parameters of the kernels: some rows and columns of a call. A parameter named chunk may also be a slice or a panel of one. */
template <class Call> struct lk_head_work {
    Call call;
    lk_head_workspace ws;
    int64_t block_tokens; /* of the loss's first kernel */
    int power;            /* where the loss scales 16-bit dZ: it is stored as about 2^power times its value for a factor of 1 */
    int64_t first_row, rows; /* of a chunk of tokens */
    int64_t first_col, cols; /* of a panel of its columns, or all of them */
    int first, last;         /* not 0: the first, the last panel of its chunk */
};

template <class Call> struct lk_head_rows;

/* A call while it is launched. mode: LK_CUBLAS_RESOLVE launches nothing; it only finds an algorithm for every matmul. */
template <class Call> struct lk_head_job {
    const char *op;
    cudaStream_t stream;
    lk_device device;
    lk_head_work<Call> p;
    lk_head_shape shape;
    lk_head_plan plan;
    int mode;
    bool has_logits; /* CHUNKS: they are computed already, those of all rows */
    const lk_vocab_parallel *parallel; /* of a rank, with `split`; else NULL */
    int reduce_sms; /* SMs that matmuls leave free, after `reduce` has been called */
    const lk_head_rows<Call> *rows;
};

template <class Call> struct lk_head_fused; /* lk_head_sm90.cuh's */

/* What a loss does with rows of logits. The head calls other_logits, dbias and `fused` in both modes, no_columns outside of them,
 * and all others in LK_CUBLAS_LAUNCH only. */
template <class Call> struct lk_head_rows {
    lk_status (*begin)(const lk_head_job<Call> *job); /* before all others: what each row needs, and counts->alpha */
    /* CHUNKS, in both modes: logits of a second head. NULL: there is none. */
    lk_status (*other_logits)(const lk_head_job<Call> *job, const lk_head_work<Call> &slice);
    /* CHUNKS: results of rows from logits of all columns, and dZ. */
    lk_status (*slice)(const lk_head_job<Call> *job, const lk_head_work<Call> &slice);
    /* Adds a chunk's dZ, of all columns or of a panel's, to the sums of dbias: lk_head_dbias. */
    lk_status (*dbias)(const lk_head_job<Call> *job, const lk_head_work<Call> &chunk);
    /* PANELS, a panel of a chunk's columns. LK_FORWARD: adds it to the rows' states; after the last one the results follow.
     * LK_BACKWARD: dZ. NULL: the plan may not be PANELS. */
    lk_status (*panel)(const lk_head_job<Call> *job, const lk_head_work<Call> &panel, lk_direction direction);
    /* Writes the parts of p's outputs that no matmul writes. With `split` and dx it is called twice: before parallel.reduce
     * for dx, without dweight and dbias, and at the end for the others. NULL: nothing. */
    lk_status (*finish)(const lk_head_job<Call> *job, const lk_head_work<Call> &p);
    lk_status (*no_columns)(const lk_head_job<Call> *job, lk_direction direction); /* of a rank without columns: its states */
    lk_status (*fused)(lk_head_job<Call> *job, int64_t chunk); /* lk_head_run_fused; NULL, as all below: there is no FUSED */
    /* After the states: results of a chunk's rows, and what their exponentials are multiplied by. */
    lk_status (*fused_rows)(const lk_head_job<Call> *job, const lk_head_fused<Call> &p);
    lk_status (*fused_backward)(const lk_head_job<Call> *job);              /* in backward, before the panels */
    void (*fused_terms)(const lk_head_job<Call> *job, lk_head_work<Call> *panel); /* changes what dZ follows from; NULL: nothing */
    lk_status (*fused_panel)(const lk_head_job<Call> *job, const lk_head_work<Call> &panel); /* after its dZ; NULL: nothing */
    const void *args; /* the loss's own */
};

#define LK_HEAD_BLOCKS 3 /* at least, per SM; without this bound ptxas gives these kernels fewer registers than they need */

/* ---- Products and launches ----------------------------------------------------------------------------------------------- */

/* A product without its sizes; of_dz: one of its factors is dZ. */
template <class Call> LK_HOST lk_cublas_product lk_head_product(const lk_head_job<Call> *job, int type, bool of_dz)
{
    const lk_head_shape &s = job->shape;
    lk_cublas_product m = {};
    m.key.factor_type = s.type, m.key.type = type, m.key.tf32 = s.type == LK_DTYPE_F32 && s.tf32;
    if (of_dz && s.type != LK_DTYPE_F32) m.scalars = &job->p.ws.counts->alpha;
    return m;
}

template <class Call> LK_HOST lk_cublas_call lk_head_cublas(const lk_head_job<Call> *job)
{
    lk_cublas_context *const context = (lk_cublas_context *)job->p.call.a.context;
    return {job->op, job->stream, context, job->p.ws.cublas, job->plan.cublas_bytes, job->mode};
}
template <class Call> LK_HOST lk_status lk_head_multiply(const lk_head_job<Call> *job, lk_cublas_product *m)
{
    const lk_cublas_call call = lk_head_cublas(job);
    return lk_cublas_multiply(&call, m);
}

/* A product that has columns of the vocabulary as one of its sizes. */
template <class Call>
LK_HOST lk_status lk_head_multiply_columns(const lk_head_job<Call> *job, lk_cublas_product *m, int64_t lk_cublas_key::*cols)
{
    const lk_cublas_call call = lk_head_cublas(job);
    return lk_cublas_multiply_columns(&call, m, cols, lk_head_tail_cols(&job->shape, m->key.*cols));
}

template <class Call, class Args>
LK_HOST lk_status lk_head_launch(const lk_head_job<Call> *job, void (*kernel)(Args), int64_t grid, const Args &args)
{
    if (job->mode == LK_CUBLAS_RESOLVE) return LK_OK;
    return lk_launch_pdl(job->op, &job->device, kernel, grid, 1, LK_HEAD_THREADS, 0, job->stream, args);
}

/* ---- Copies of rows: compacted x, gradients that are rounded ------------------------------------------------------------- */

template <class In, class Out, class Call>
LK_HOST lk_status lk_head_move_rows(const lk_head_job<Call> *job, const lk_move &move)
{
    return job->mode == LK_CUBLAS_RESOLVE ? LK_OK : lk_move_rows<In, Out>(job->op, &job->device, move, job->stream);
}

/* ---- The matmuls of a chunk, and dbias ----------------------------------------------------------------------------------- */

/* Elements between rows of dZ. 16-bit dZ over f32 logits has rows of twice as many. */
template <class Call> LK_HOST int64_t lk_head_dz_stride(const lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    const lk_head_shape &s = job->shape;
    const lk_head_workspace &ws = chunk.ws;
    if (ws.slice || job->plan.path == LK_HEAD_PATH_FUSED) return ws.logits_stride;
    return ws.logits_stride * lk_head_bytes_of(s.logits_type) / lk_head_bytes_of(s.type);
}

/* The row of its chunk that some rows begin with. */
template <class Call> LK_HOST int64_t lk_head_in_chunk(const lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    return chunk.first_row % job->plan.chunk_tokens;
}

/* Copies x of a chunk where rows are compacted. */
template <class T, class Call> LK_HOST lk_status lk_head_compact(const lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    const typename Call::args &a = chunk.call.a;
    const lk_head_workspace &ws = chunk.ws;
    if (!job->shape.compact) return LK_OK;
    return lk_head_move_rows<T, T>(job, {a.x, ws.x, ws.token + chunk.first_row, NULL, chunk.rows, a.hidden, a.x_stride,
                                         ws.x_stride, 0, NULL});
}
/* x of the rows. */
template <class T, class Call> LK_HOST const void *lk_head_x(const lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    const typename Call::args &a = chunk.call.a;
    const lk_head_workspace &ws = chunk.ws;
    return job->shape.compact ? (const T *)ws.x + lk_head_in_chunk(job, chunk) * ws.x_stride
                              : (const T *)a.x + chunk.first_row * a.x_stride;
}
template <class Call> LK_HOST int64_t lk_head_x_stride(const lk_head_job<Call> *job)
{
    return job->shape.compact ? job->p.ws.x_stride : job->p.call.a.x_stride;
}

template <class T, class Call> LK_HOST lk_status lk_head_logits(lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    const lk_head_shape &s = job->shape;
    const lk_head_workspace &ws = chunk.ws;
    const typename Call::args &a = chunk.call.a;
    lk_cublas_product m = lk_head_product(job, s.logits_type, false);
    m.key.transpose_a = 1;
    m.key.m = chunk.cols, m.key.n = chunk.rows, m.key.k = a.hidden;
    m.key.lda = a.weight_stride, m.key.ldb = lk_head_x_stride(job), m.key.ldd = ws.logits_stride;
    m.a = (const T *)a.weight + chunk.first_col * a.weight_stride, m.b = lk_head_x<T>(job, chunk);
    m.d = ws.slice ? (void *)ws.slice : ws.logits;
    if (a.bias) m.bias = (const char *)ws.bias + chunk.first_col * lk_head_bytes_of(s.logits_type);
    const int64_t tail = ws.tail ? lk_head_tail_cols(&s, chunk.cols) : 0;
    if (!tail) return lk_head_multiply_columns(job, &m, &lk_cublas_key::m);
    m.key.m -= tail;
    const lk_status status = lk_head_multiply(job, &m);
    if (status) return status;
    m.d = (char *)m.d + m.key.m * lk_head_bytes_of(s.logits_type);
    m.a = ws.tail, m.key.lda = ws.x_stride, m.key.m = 8; /* rows of logits have room behind their last column */
    return lk_head_multiply(job, &m);
}

/* Copies weight of the tail columns, and writes rows of zeros behind them, up to eight. */
template <class T, class Call>
LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS) lk_head_tail_kernel(const __grid_constant__ lk_head_work<Call> p)
{
    const typename Call::args &a = p.call.a;
    const int64_t i = (int64_t)blockIdx.x * LK_HEAD_THREADS + threadIdx.x, row = i / a.hidden, col = i % a.hidden, tail = a.vocab % 8;
    lk_griddepcontrol_wait();
    if (row >= 8) return;
    const T *const from = (const T *)a.weight + (a.vocab - tail + row) * a.weight_stride + col;
    lk_put((T *)p.ws.tail + row * p.ws.x_stride + col, row < tail ? lk_to_float(*from) : 0.0f);
}

/* Computes dx of a chunk, or adds a panel's part to it. */
template <class T, class Call> LK_HOST lk_status lk_head_dx(lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    const lk_head_shape &s = job->shape;
    const typename Call::args &a = chunk.call.a;
    const lk_head_workspace &ws = chunk.ws;
    lk_cublas_product m = lk_head_product(job, ws.dx ? LK_DTYPE_F32 : s.type, !job->plan.f32_dx); /* f32_dx: alpha comes later */
    m.key.m = a.hidden, m.key.n = chunk.rows, m.key.k = chunk.cols;
    m.key.lda = a.weight_stride, m.key.ldb = lk_head_dz_stride(job, chunk);
    m.key.ldd = ws.dx ? a.hidden : s.compact ? ws.x_stride : a.dx_stride;
    m.a = (const T *)a.weight + chunk.first_col * a.weight_stride, m.b = ws.logits;
    m.d = ws.dx ? (void *)ws.dx : s.compact ? ws.x : (T *)a.dx + chunk.first_row * a.dx_stride;
    m.add = !chunk.first;
    return lk_head_multiply_columns(job, &m, &lk_cublas_key::k);
}

/* Copies dx of a chunk from the workspace to the caller's dx. */
template <class T, class Call> LK_HOST lk_status lk_head_put_dx(const lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    const lk_head_shape &s = job->shape;
    const typename Call::args &a = chunk.call.a;
    const lk_head_workspace &ws = chunk.ws;
    if (!a.dx || !(ws.dx || s.compact)) return LK_OK;
    T *const to = (T *)a.dx + (s.compact ? 0 : chunk.first_row * a.dx_stride);
    const int32_t *const token = s.compact ? ws.token + chunk.first_row : NULL;
    const lk_move move = {ws.dx ? (const void *)ws.dx : ws.x, to, NULL, token, chunk.rows, a.hidden,
                          ws.dx ? a.hidden : ws.x_stride, a.dx_stride, 0, NULL};
    return ws.dx ? lk_head_move_rows<float, T>(job, move) : lk_head_move_rows<T, T>(job, move);
}

/* Computes a chunk's part of dweight, of all columns or of a panel's, and adds it to that of the chunks before. */
template <class T, class Call> LK_HOST lk_status lk_head_dweight(lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    const typename Call::args &a = chunk.call.a;
    const lk_head_workspace &ws = chunk.ws;
    lk_cublas_product m = lk_head_product(job, ws.dweight ? LK_DTYPE_F32 : a.dweight_dtype, true);
    m.key.transpose_b = 1;
    m.key.m = a.hidden, m.key.n = chunk.cols, m.key.k = chunk.rows;
    m.key.lda = ws.scaled_x ? ws.x_stride : lk_head_x_stride(job), m.key.ldb = lk_head_dz_stride(job, chunk);
    m.key.ldd = ws.dweight ? a.hidden : a.dweight_stride;
    m.a = ws.scaled_x ? ws.scaled_x : lk_head_x<T>(job, chunk), m.b = ws.logits;
    m.d = ws.dweight ? (void *)(ws.dweight + chunk.first_col * a.hidden)
                    : (char *)a.dweight + chunk.first_col * a.dweight_stride * lk_head_bytes_of(a.dweight_dtype);
    m.add = chunk.first_row > 0 || (a.accumulate && !ws.dweight);
    if (job->reduce_sms) m.key.sms = job->device.sms - job->reduce_sms > 2 ? job->device.sms - job->reduce_sms : 2;
    return lk_head_multiply_columns(job, &m, &lk_cublas_key::n);
}

/* Rounds sums of dweight in the workspace to the caller's dweight. */
template <class T, class Call> LK_HOST lk_status lk_head_put_dweight(const lk_head_job<Call> *job)
{
    const lk_head_workspace &ws = job->p.ws;
    const typename Call::args &a = job->p.call.a;
    if (!ws.dweight || !job->shape.gradient) return LK_OK;
    return lk_head_move_rows<float, T>(job, {ws.dweight, a.dweight, NULL, NULL, a.vocab, a.hidden, a.hidden, a.dweight_stride,
                                             a.accumulate, NULL});
}

template <class Call> struct lk_head_columns {
    lk_head_work<Call> chunk;
    int64_t stride; /* of dZ */
    int add;        /* not 0: to the sums of the chunks before */
};

/* A thread sums a column over its block's rows of the chunk. */
template <class Out, class Call>
LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS) lk_head_columns_kernel(lk_head_columns<Call> p)
{
    const lk_head_work<Call> &chunk = p.chunk;
    const typename Call::args &a = chunk.call.a;
    const lk_head_workspace &ws = chunk.ws;
    const int64_t tiles = (chunk.cols + LK_HEAD_THREADS - 1) / LK_HEAD_THREADS, split = blockIdx.x / tiles;
    const int64_t col = blockIdx.x % tiles * LK_HEAD_THREADS + threadIdx.x, rows = (chunk.rows + ws.splits - 1) / ws.splits;
    const int64_t end = (split + 1) * rows < chunk.rows ? (split + 1) * rows : chunk.rows;
    lk_griddepcontrol_wait();
    if (col >= chunk.cols) return;
    float *out = ws.dbias + split * a.vocab + chunk.first_col + col;
    float sum = p.add ? *out : 0.0f;
    LK_UNROLL_BY(8) for (int64_t row = split * rows; row < end; row++) {
        const float dz = lk_to_float(((const Out *)ws.logits)[row * p.stride + col]);
        sum = fmaf(ws.scale ? ws.scale[row] : 1.0f, dz, sum);
    }
    *out = sum;
}

template <class T, class Call> LK_HOST lk_status lk_head_dbias(const lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    const typename Call::args &a = chunk.call.a;
    const lk_head_workspace &ws = chunk.ws;
    if (!a.dbias) return LK_OK;
    const lk_head_columns<Call> columns = {chunk, lk_head_dz_stride(job, chunk), chunk.first_row > 0};
    return lk_head_launch(job, lk_head_columns_kernel<T, Call>, lk_ceil_div(chunk.cols, LK_HEAD_THREADS) * ws.splits, columns);
}

/* After the last chunk: completes dx and passes all of it to the caller's `reduce`, which sums it over the ranks. It is one call,
 * not one per chunk: all ranks have to make the same calls, and their plans may have different chunks. */
template <class Call> LK_HOST lk_status lk_head_reduce_dx(lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    lk_head_work<Call> p = job->p;
    const typename Call::args &a = p.call.a;
    if (!job->shape.split || !a.dx || chunk.first_row + chunk.rows < job->shape.rows) return LK_OK;
    const lk_vocab_parallel &v = *job->parallel;
    if (v.reduce) job->reduce_sms = v.reduce_sms;
    if (job->mode == LK_CUBLAS_RESOLVE) return LK_OK;
    p.call.a.dweight = p.call.a.dbias = NULL;
    lk_status status = LK_OK;
    if (job->rows->finish) status = job->rows->finish(job, p); /* dx of rows that no matmul writes */
    if (status || !v.reduce) return status;
    return lk_called_back(job->op, "reduce", v.reduce(v.user, a.dx, a.tokens, job->stream));
}

/* ---- Chunks and panels --------------------------------------------------------------------------------------------------- */

/* The panel-th panel of the index-th chunk. */
template <class Call> LK_HOST lk_head_work<Call> lk_head_panel_at(const lk_head_job<Call> *job, int64_t index, int64_t panel)
{
    const lk_head_shape &s = job->shape;
    const lk_head_plan &plan = job->plan;
    lk_head_work<Call> chunk = job->p;
    chunk.first_row = index * plan.chunk_tokens, chunk.rows = lk_head_min(plan.chunk_tokens, s.rows - chunk.first_row);
    chunk.first_col = panel * plan.panel_vocab, chunk.cols = lk_head_min(plan.panel_vocab, s.vocab - chunk.first_col);
    chunk.first = panel == 0, chunk.last = panel + 1 == plan.panels;
    return chunk;
}

/* CHUNKS: one chunk with the logits of the whole vocabulary. */
template <class T, class Call> LK_HOST lk_status lk_head_run_chunk(lk_head_job<Call> *job, int64_t index)
{
    const lk_head_shape &s = job->shape;
    const typename Call::args &a = job->p.call.a;
    lk_head_work<Call> chunk = lk_head_panel_at(job, index, 0);
    const int64_t before = chunk.first_row * chunk.ws.logits_stride * lk_head_bytes_of(s.logits_type);
    if (s.stores) chunk.ws.slice = (float *)((char *)chunk.ws.slice + before);
    lk_status status = lk_head_compact<T>(job, chunk);
    const int64_t step = job->plan.slice_tokens ? job->plan.slice_tokens : chunk.rows, slices = lk_ceil_div(chunk.rows, step);
    for (int64_t i = 0; i < slices && !status; i = lk_cublas_next(job->mode, i, slices)) {
        lk_head_work<Call> slice = chunk;
        slice.first_row += i * step, slice.rows = lk_head_min(step, chunk.rows - i * step);
        if (!job->has_logits) status = lk_head_logits<T>(job, slice);
        if (!job->has_logits && !status && job->rows->other_logits) status = job->rows->other_logits(job, slice);
        if (!status && job->mode == LK_CUBLAS_LAUNCH) status = job->rows->slice(job, slice);
    }
    if (!s.gradient) return status;
    if (!status) status = job->rows->dbias(job, chunk);
    if (!status && a.dweight && !s.split) status = lk_head_dweight<T>(job, chunk); /* before dx: it may overwrite the copy of x */
    if (!status && a.dx) status = lk_head_dx<T>(job, chunk);
    if (!status) status = lk_head_put_dx<T>(job, chunk);
    if (!status) status = lk_head_reduce_dx(job, chunk);
    return !status && a.dweight && s.split ? lk_head_dweight<T>(job, chunk) : status;
}

/* PANELS: one chunk in panels: the rows' states, then the gradients. */
template <class T, class Call> LK_HOST lk_status lk_head_run_panels(lk_head_job<Call> *job, int64_t index)
{
    const lk_head_shape &s = job->shape;
    const typename Call::args &a = job->p.call.a;
    const bool dx_first = s.split && !s.compact; /* compacted dx may overwrite the copy of x */
    const bool launches = job->mode == LK_CUBLAS_LAUNCH;
    const int64_t panels = job->plan.panels;
    lk_status status = lk_head_compact<T>(job, lk_head_panel_at(job, index, 0));
    const bool forward = s.gives_loss || !s.split;
    for (int64_t panel = 0; panel < panels && !status && forward; panel = lk_cublas_next(job->mode, panel, panels)) {
        const lk_head_work<Call> chunk = lk_head_panel_at(job, index, panel);
        status = lk_head_logits<T>(job, chunk);
        if (!status && launches) status = job->rows->panel(job, chunk, LK_FORWARD);
    }
    if (!s.gradient) return status;
    for (int64_t panel = 0; panel < panels && !status; panel = lk_cublas_next(job->mode, panel, panels)) {
        const lk_head_work<Call> chunk = lk_head_panel_at(job, index, panel);
        status = lk_head_logits<T>(job, chunk); /* again; then dZ */
        if (!status && launches) status = job->rows->panel(job, chunk, LK_BACKWARD);
        if (!status) status = job->rows->dbias(job, chunk);
        if (!status && a.dweight && !dx_first) status = lk_head_dweight<T>(job, chunk);
        if (!status && a.dx) status = lk_head_dx<T>(job, chunk);
        if (!status && chunk.last) status = lk_head_put_dx<T>(job, lk_head_panel_at(job, index, 0));
        if (!status && chunk.last) status = lk_head_reduce_dx(job, chunk);
        if (!status && a.dweight && dx_first) status = lk_head_dweight<T>(job, chunk);
    }
    return status;
}

/* ---- All of a call ------------------------------------------------------------------------------------------------------- */

/* Runs a call in the job's mode. */
template <class T, class Call> LK_HOST lk_status lk_head_run_all(lk_head_job<Call> *job)
{
    const lk_head_shape &s = job->shape;
    const int64_t chunks = job->plan.chunks;
    const int path = job->plan.path;
    const bool launches = job->mode == LK_CUBLAS_LAUNCH;
    lk_status status = LK_OK;
    job->reduce_sms = 0;
    if (s.rows > 0 && launches) status = job->rows->begin(job);
    if (s.rows > 0 && !status && job->p.ws.tail && !job->has_logits)
        status = lk_head_launch(job, lk_head_tail_kernel<T, Call>, lk_ceil_div(8 * s.hidden, LK_HEAD_THREADS), job->p);
    for (int64_t chunk = 0; chunk < chunks && !status; chunk = lk_cublas_next(job->mode, chunk, chunks))
        status = path == LK_HEAD_PATH_FUSED    ? job->rows->fused(job, chunk)
                 : path == LK_HEAD_PATH_CHUNKS ? lk_head_run_chunk<T>(job, chunk)
                                               : lk_head_run_panels<T>(job, chunk);
    if (!status) status = lk_head_put_dweight<T>(job);
    if (status || !launches || !job->rows->finish) return status;
    lk_head_work<Call> rest = job->p;
    if (s.split) rest.call.a.dx = NULL; /* lk_head_reduce_dx has completed it */
    return job->rows->finish(job, rest);
}

/* First goes through all matmuls without a launch, so that cuBLASLt refuses one before anything has run. */
template <class T, class Call> LK_HOST lk_status lk_head_run(lk_head_job<Call> *job)
{
    lk_status status = LK_OK;
    for (job->mode = LK_CUBLAS_RESOLVE; job->mode <= LK_CUBLAS_LAUNCH && !status; job->mode++) status = lk_head_run_all<T>(job);
    return status;
}

/* The plan of a checked call within a budget; least: or the smallest, where that is more. before: bytes of the workspace that come
 * before its arrays, and are not the plan's. */
LK_HOST lk_status lk_head_query(const char *op, lk_head_planner *planner, size_t before, size_t budget, bool least, lk_head_plan *plan)
{
    const size_t needed = before + planner->least;
    if (budget < needed && !least)
        return lk_fail(LK_ERR_WORKSPACE, op, "the budget is %zu; this call needs a workspace of %zu bytes", budget, needed);
    lk_head_choose(planner, budget < needed ? planner->least : budget - before, plan);
    return LK_OK;
}

/* The call of a rank without columns, which adds 0 to dx. */
template <class T, class Call> LK_HOST lk_status lk_head_no_columns(const lk_head_job<Call> *job, lk_direction direction)
{
    const typename Call::args &a = job->p.call.a;
    const lk_vocab_parallel &v = *job->parallel;
    if (a.tokens == 0) return LK_OK;
    const lk_status status = job->rows->no_columns(job, direction);
    if (status || !a.dx || !job->shape.gradient) return status;
    const size_t stride = (size_t)a.dx_stride * sizeof(T), width = (size_t)a.hidden * sizeof(T);
    const lk_status set = lk_launched(job->op, cudaMemset2DAsync(a.dx, stride, 0, width, (size_t)a.tokens, job->stream));
    return set || !v.reduce ? set : lk_called_back(job->op, "reduce", v.reduce(v.user, a.dx, a.tokens, job->stream));
}

#endif /* CUDA or the simulator */
#endif

// SPDX-License-Identifier: MIT
/* linear_cross_entropy_parallel.cuh - linear_cross_entropy.cuh for columns that are split over ranks (GPUs, or processes): a
 * vocabulary-parallel head. Each rank has all tokens and some columns of the weight, and gets the results of all columns.
 *
 *   forward    each rank computes its states from its own columns, as in cross_entropy_parallel.cuh
 *   the collective, finish   as there
 *   backward   each rank computes dweight and dbias of its own columns, and its part of dx: the caller, or parallel.reduce, sums
 *              the parts of all ranks
 *
 * Use        In one .cu file, linked with -lcublasLt:
 *                #include "lk/linear_cross_entropy_parallel.cuh"
 *                LK_DEFINE_LINEAR_CROSS_ENTROPY_PARALLEL(bf16)
 *            Anywhere, C included: LK_DECLARE_LINEAR_CROSS_ENTROPY_PARALLEL(bf16).
 *            The calls are those of lk_ranks.cuh, the manual of all headers for ranks. `common` is lk_linear_cross_entropy_args:
 *            weight, bias, dweight, dbias and vocab are of this rank's columns; target and class_weight are of the whole
 *            vocabulary. ..._workspace_bytes, ..._plan and ..._saved_bytes are as in linear_cross_entropy.cuh; finish has no plan.
 *            An example with NCCL is in examples/parallel.
 * States     Those of cross_entropy_parallel.cuh, of tokens. backward counts a mean's tokens by itself.
 * Needs      linear_cross_entropy.cuh, cross_entropy_parallel.cuh, lk_ranks.cuh and what these need.
 * Options    Those of linear_cross_entropy.cuh. Each rank has a plan of its own: PANELS or FUSED, never CHUNKS. forward_backward is
 *            forward and backward in one workspace: 3 matmuls where the exponentials of this rank's columns fit (FUSED; without
 *            label_smoothing, entropy, argmax and dentropy), else 4.
 *            dx is this rank's part, rounded to T; the dx of a rank without columns is 0. Ask for dx on all ranks or on none.
 *            lk calls parallel.reduce once, with all tokens, as soon as dx is complete. Then the sum over ranks can run at the
 *            same time as the last panel's matmul for dweight; with one panel that is all of dweight. This matmul leaves
 *            parallel.reduce_sms SMs free for the sum. With NCCL, set reduce_sms = 8 and NCCL's maxCTAs = 8. PANELS with
 *            max_counted computes dweight before dx. If reduce is NULL, the caller sums dx.
 *            If more than max_counted tokens count, an ignored token keeps its results: loss, z-loss, lse and entropy 0, argmax -1.
 *            (In linear_cross_entropy.cuh its loss, z-loss, lse and entropy are NaN then.)
 * Errors     Those of lk_ranks.cuh, then as in linear_cross_entropy.cuh. LK_ERR_PATH: path CHUNKS. LK_ERR_CUBLAS: if cuBLASLt has
 *            no algorithm for a matmul of backward, forward_backward has already launched forward, all_gather and finish.
 * Read on    lk/linear_cross_entropy.md: plans of the workspace, how exact results are, and what is read and written.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_LINEAR_CROSS_ENTROPY_PARALLEL_CUH
#define LK_LINEAR_CROSS_ENTROPY_PARALLEL_CUH

#include "cross_entropy_parallel.cuh"
#include "linear_cross_entropy.cuh"

/* One struct for all calls. */
typedef struct {
    lk_linear_cross_entropy_args common;
    lk_vocab_parallel parallel;
    void *states;           /* see States. forward writes them; finish writes what backward reads, or NULL to skip */
    const void *all_states; /* [ranks][tokens] of them: finish reads them */
} lk_linear_cross_entropy_parallel_args;

#define LK_LINEAR_CROSS_ENTROPY_PARALLEL_FUNCTIONS(X, T)                                                                       \
    X##_PLANNED(linear_cross_entropy_parallel, forward, LK_FORWARD, linear_cross_entropy, T)                                   \
    X##_PLANNED(linear_cross_entropy_parallel, backward, LK_BACKWARD, linear_cross_entropy, T)                                 \
    X##_PLANNED(linear_cross_entropy_parallel, forward_backward, LK_BOTH, linear_cross_entropy, T)                             \
    X##_CALL(linear_cross_entropy_parallel, finish, LK_FINISH, T)                                                              \
    X##_SAVED(linear_cross_entropy_parallel, T)
#define LK_DECLARE_LINEAR_CROSS_ENTROPY_PARALLEL(T) LK_DECLARE(LINEAR_CROSS_ENTROPY_PARALLEL, T)
#define LK_DEFINE_LINEAR_CROSS_ENTROPY_PARALLEL(T) LK_DEFINE(LINEAR_CROSS_ENTROPY_PARALLEL, T)

#if LK_CUDA

/* ---- Steps --------------------------------------------------------------------------------------------------------------- */

/* A call that gathers: the states, finish, and for gradients backward, in one workspace. forward_backward keeps the exponentials of
 * all logits if they fit, as with `saved`; then its backward has no matmul for logits. linear_cross_entropy_ids_parallel.cuh has
 * such steps too. */
typedef struct {
    lk_lce_call call; /* the whole call */
    lk_lce_args forward, backward;
    lk_lce_rank rank;           /* of both */
    void *all_states;
    int64_t bytes;              /* of states */
    size_t fixed, least;        /* bytes besides those of the steps; the smallest workspace */
    size_t saved, least_saving; /* the bytes of exponentials, and the smallest workspace with them; 0: they cannot be kept */
} lk_lce_steps;

/* The smallest workspace of these steps; backward: NULL where there is none. no_panels: as in lk_lce_call. */
template <class T>
LK_HOST lk_status lk_lce_steps_least(const char *op, const lk_lce_steps *s, const lk_lce_args *forward,
                                     const lk_lce_args *backward, bool no_panels, size_t *least)
{
    lk_lce_call call;
    lk_head_planner planner;
    lk_status status = lk_lce_begin_step<T>(op, forward, LK_FORWARD, true, &call, &planner, no_panels, &s->rank);
    if (!status) *least = planner.least;
    if (!status && backward)
        status = lk_lce_begin_step<T>(op, backward, LK_BACKWARD, true, &call, &planner, no_panels, &s->rank);
    if (!status && *least < planner.least) *least = planner.least;
    return status;
}

/* The steps of a call that is checked, and what they share, from the arena. rank, all_states: with their memory. row_bytes: of a
 * token's state and what lies behind it. */
LK_HOST void lk_lce_split_call(const lk_lce_args *args, bool both, const lk_lce_rank *rank, const void *all_states,
                               int64_t row_bytes, lk_arena *arena, lk_lce_steps *s)
{
    const int64_t tokens = args->tokens;
    const lk_lce_args &checked = s->call.a;
    lk_lce_args &f = s->forward = *args, &b = s->backward = *args;
    s->rank = *rank, s->rank.parallel.all_gather = NULL, s->all_states = const_cast<void *>(all_states);
    s->bytes = tokens * row_bytes;
    lk_lce_put_strides(&f, checked), lk_lce_put_strides(&b, checked);
    if (both) {
        f.batch_invariant = 0; /* forward_backward has none */
        if (!f.lse) lk_take(&f.lse, arena, true, tokens);
        if (!f.lse_low) lk_take(&f.lse_low, arena, true, tokens);
        if (f.dentropy && !f.entropy) lk_take(&f.entropy, arena, true, tokens);
    }
    b.lse = f.lse, b.lse_low = f.lse_low, b.entropy = f.entropy;
    b.bad_targets = NULL; /* finish has counted them */
}

/* Gives the steps what is left of a workspace of so many bytes. */
LK_HOST void lk_lce_share(const lk_lce_args *args, size_t bytes, lk_lce_steps *s)
{
    char *const base = lk_head_base(args->workspace) + (s->fixed ? s->fixed - 256 : 0);
    const size_t kept = bytes >= s->least_saving ? s->saved : 0;
    if (kept) s->forward.saved = s->backward.saved = base;
    for (lk_lce_args *step : {&s->forward, &s->backward}) {
        step->workspace = base + kept;
        step->workspace_bytes = bytes - s->fixed - kept;
    }
}

/* Runs the steps. whole: with all_gather. step: makes LK_FORWARD, LK_FINISH or LK_BACKWARD. */
LK_HOST lk_status lk_lce_run_steps(const char *op, const lk_lce_args *args, const lk_vocab_parallel &whole, lk_lce_steps *s,
                                   lk_direction direction, cudaStream_t stream, lk_status (*step)(void *, lk_direction), void *job)
{
    lk_checks checks = {op, LK_OK};
    lk_check_workspace(&checks, args->workspace, args->workspace_bytes, s->least);
    if (checks.status) return checks.status;
    lk_lce_share(args, args->workspace_bytes, s);
    const lk_ranks ranks = {op, stream, whole, args->vocab, s->rank.states, s->all_states, (size_t)s->bytes, 1, step, job};
    return lk_ranks_run(&ranks, direction);
}

/* The plan of a call whose steps share the workspace. */
template <class T>
LK_HOST lk_status lk_lce_query_steps(const char *op, const lk_lce_args *args, lk_direction direction, size_t budget, bool least,
                                     lk_lce_steps *s, lk_linear_cross_entropy_plan *plan)
{
    lk_lce_call call;
    lk_head_planner planner;
    lk_head_plan of[2] = {};
    lk_status status = LK_OK;
    if (budget < s->least && !least)
        return lk_fail(LK_ERR_WORKSPACE, op, "the budget is %zu; this call needs a workspace of %zu bytes", budget, s->least);
    if (budget < s->least) budget = s->least;
    lk_lce_share(args, budget, s);
    const bool both = direction == LK_BOTH && s->call.gradient;
    const size_t left = s->forward.workspace_bytes;
    for (int i = 0; i <= both && !status; i++) {
        status = lk_lce_begin_step<T>(op, i ? &s->backward : &s->forward, i ? LK_BACKWARD : LK_FORWARD, true, &call, &planner,
                                      s->call.no_panels, &s->rank);
        if (!status) lk_head_choose(&planner, left, &of[i]);
    }
    if (status) return status;
    const size_t most = of[0].workspace_bytes > of[1].workspace_bytes ? of[0].workspace_bytes : of[1].workspace_bytes;
    *plan = lk_lce_answer(&planner, &of[both]);
    plan->workspace_bytes = budget - left + most, plan->minimum_bytes = s->least;
    plan->matmuls = of[0].matmuls + of[1].matmuls;
    char text[sizeof plan->text];
    memcpy(text, plan->text, sizeof text);
    if (both)
        snprintf(plan->text, sizeof plan->text, "forward with %d matmul%s, then backward: %.240s", of[0].matmuls,
                 of[0].matmuls == 1 ? "" : "s", text);
    return LK_OK;
}

/* ---- Labels -------------------------------------------------------------------------------------------------------------- */

/* A call whose rows have a target. */
typedef struct {
    const char *op;
    cudaStream_t stream;
    lk_lce_rank rank; /* as the caller has it */
    lk_lce_steps steps;
    lk_cross_entropy_parallel_args finish;
    lk_lce_rows rows;
} lk_lce_label_ranks;

/* The arguments of finish. */
LK_HOST lk_cross_entropy_parallel_args lk_lce_parallel_finish_args(const lk_linear_cross_entropy_parallel_args *x)
{
    return {lk_lce_finish_args(&x->common), x->parallel, x->states, x->all_states};
}

/* Checks `parallel`; x becomes the arguments with the place of the states, which `more` shows to the checks. */
LK_HOST lk_status lk_lce_parallel_begin(const char *op, const lk_linear_cross_entropy_parallel_args *args, lk_direction direction,
                                        lk_arena *arena, lk_linear_cross_entropy_parallel_args *x, lk_lce_rank *rank,
                                        lk_lce_added *more)
{
    lk_checks checks = {op, LK_OK};
    *x = *args;
    lk_lce_args *const a = &x->common;
    lk_cross_entropy_check_statistics(&checks, a, direction == LK_FORWARD);
    lk_ranks_check(&checks, x->parallel, a->vocab, direction);
    if (checks.status) return checks.status; /* before sizes are computed of it */
    lk_lce_args sized = *a;
    if (direction == LK_FORWARD) sized.dentropy = NULL;
    lk_tensor list[2] = {};
    lk_ranks_place(x->parallel, direction, a->tokens, lk_ce_state_bytes(&sized), 4, a->statistics ? 8 : 16, arena, &x->states,
                   &x->all_states, &list);
    *rank = {x->parallel, x->states, (float *)x->states};
    more->list[0] = list[0], more->list[1] = list[1], more->rank = rank;
    return LK_OK;
}

/* Checks a call that gathers as a whole, and divides the workspace. */
template <class T>
LK_HOST lk_status lk_lce_parallel_split(const char *op, const lk_linear_cross_entropy_parallel_args *args, lk_direction direction,
                                        bool query, lk_lce_label_ranks *r)
{
    const bool both = direction == LK_BOTH;
    lk_linear_cross_entropy_parallel_args x;
    lk_lce_added more = {};
    lk_lce_steps &s = r->steps;
    size_t finish_bytes = 0, least = 0;
    *r = {};
    lk_arena arena = {(uintptr_t)lk_head_base(args->common.workspace), 0, 256};
    lk_status status = lk_lce_parallel_begin(op, args, direction, &arena, &x, &r->rank, &more);
    if (!status) status = lk_lce_check<T>(op, &args->common, direction, query, &s.call, NULL, &more);
    if (status) return status;
    lk_lce_args sized = x.common;
    if (!both) sized.dentropy = NULL;
    lk_lce_split_call(&x.common, both, &r->rank, x.all_states, lk_ce_state_bytes(&sized), &arena, &s);
    lk_lce_args &f = s.forward, &b = s.backward;
    r->finish = {lk_lce_finish_args(&f), s.rank.parallel, x.states, x.all_states};
    status = lk_cross_entropy_parallel_query<T>(op, &r->finish, LK_FINISH, &finish_bytes);
    r->finish.common.workspace = lk_take_bytes(&arena, finish_bytes > 0, (int64_t)finish_bytes);
    r->finish.common.workspace_bytes = finish_bytes;
    f.saved = both ? NULL : args->common.saved, b.saved = NULL;
    s.fixed = arena.used ? arena.used + 256 : 0;
    if (!status) status = lk_lce_steps_least<T>(op, &s, &f, both && s.call.gradient ? &b : NULL, false, &least);
    s.least = s.fixed + least;
    const lk_head_shape shape = lk_lce_shape_of(&s.call);
    if (status || !both || !s.call.fused || !lk_head_keeps(&shape) || f.vocab == 0 || f.tokens == 0) return status;
    lk_lce_args kept_f = f, kept_b = b;
    s.saved = lk_lce_saved_size(&s.call);
    kept_f.saved = kept_b.saved = (void *)(arena.base + arena.used);
    status = lk_lce_steps_least<T>(op, &s, &kept_f, &kept_b, false, &least);
    s.least_saving = s.fixed + s.saved + least;
    return status;
}

template <class T> LK_HOST lk_status lk_lce_parallel_step(void *of, lk_direction step)
{
    const lk_lce_label_ranks &r = *(lk_lce_label_ranks *)of;
    const lk_lce_steps &s = r.steps;
    if (step == LK_FORWARD) return lk_lce_step<T>(r.op, &s.forward, LK_FORWARD, true, r.stream, r.rows, &s.rank);
    if (step == LK_FINISH) return lk_ce_ranks_finish<T>(r.op, &r.finish, r.stream);
    return s.call.gradient ? lk_lce_step<T>(r.op, &s.backward, LK_BACKWARD, true, r.stream, r.rows, &s.rank) : LK_OK;
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_linear_cross_entropy_parallel_run(const char *op, const lk_linear_cross_entropy_parallel_args *args,
                                                       cudaStream_t stream)
{
    if (direction == LK_FINISH) {
        const lk_cross_entropy_parallel_args f = lk_lce_parallel_finish_args(args);
        return lk_ce_ranks_finish<T>(op, &f, stream);
    }
    if (direction == LK_BOTH || lk_ranks_gathers(args->parallel, direction)) {
        lk_lce_label_ranks r = {};
        const lk_status status = lk_lce_parallel_split<T>(op, args, direction, false, &r);
        if (status) return status;
        r.op = op, r.stream = stream, r.rows = lk_lce_labels<T>(&args->common);
        return lk_lce_run_steps(op, &args->common, args->parallel, &r.steps, direction, stream, lk_lce_parallel_step<T>, &r);
    }
    lk_linear_cross_entropy_parallel_args x;
    lk_lce_rank rank;
    lk_lce_added more = {};
    lk_arena none = {0, 0, 256};
    const lk_status status = lk_lce_parallel_begin(op, args, direction, &none, &x, &rank, &more);
    if (status) return status;
    return lk_lce_step<T>(op, &args->common, direction, false, stream, lk_lce_labels<T>(&args->common), &rank, &more);
}

/* The plan within the budget. least: if the smallest plan needs more than the budget, that plan. */
template <class T>
LK_HOST lk_status lk_linear_cross_entropy_parallel_query_plan(const char *op, const lk_linear_cross_entropy_parallel_args *args,
                                                              lk_direction direction, size_t budget, bool least,
                                                              lk_linear_cross_entropy_plan *plan)
{
    if (direction == LK_BOTH || lk_ranks_gathers(args->parallel, direction)) {
        lk_lce_label_ranks r = {};
        const lk_status status = lk_lce_parallel_split<T>(op, args, direction, true, &r);
        return status ? status : lk_lce_query_steps<T>(op, &args->common, direction, budget, least, &r.steps, plan);
    }
    lk_linear_cross_entropy_parallel_args x;
    lk_lce_rank rank;
    lk_lce_added more = {};
    lk_arena none = {0, 0, 256};
    lk_lce_call call;
    lk_head_planner planner;
    lk_status status = lk_lce_parallel_begin(op, args, direction, &none, &x, &rank, &more);
    if (!status) status = lk_lce_check<T>(op, &args->common, direction, true, &call, &planner, &more);
    return status ? status : lk_lce_query_planner(op, &planner, 0, budget, least, plan);
}

/* Of finish, which has no plan. */
template <class T>
LK_HOST lk_status lk_linear_cross_entropy_parallel_query(const char *op, const lk_linear_cross_entropy_parallel_args *args,
                                                         lk_direction direction, size_t *bytes)
{
    const lk_cross_entropy_parallel_args f = lk_lce_parallel_finish_args(args);
    return lk_cross_entropy_parallel_query<T>(op, &f, direction, bytes);
}

template <class T>
LK_HOST lk_status lk_linear_cross_entropy_parallel_query_saved(const char *op, const lk_linear_cross_entropy_parallel_args *args,
                                                               size_t *bytes)
{
    lk_linear_cross_entropy_parallel_args x;
    lk_lce_rank rank;
    lk_lce_added more = {};
    lk_arena none = {0, 0, 256};
    const lk_status status = lk_lce_parallel_begin(op, args, LK_FORWARD, &none, &x, &rank, &more);
    return status ? status : lk_lce_saved_bytes<T>(op, &args->common, bytes, &more);
}

#endif /* CUDA or the simulator */
#endif

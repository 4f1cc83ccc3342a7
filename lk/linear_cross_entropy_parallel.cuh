// SPDX-License-Identifier: MIT
/* linear_cross_entropy_parallel.cuh - linear_cross_entropy.cuh for columns that are split over ranks (GPUs, or processes): a
 * vocabulary-parallel head. Each rank has all tokens and some rows of weight, and gets the results of all columns.
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
 *            The calls, dx and parallel.reduce are those of lk_ranks.cuh, the manual of all headers for ranks. `common` is
 *            lk_linear_cross_entropy_args; target and class_weight are of the whole vocabulary. ..._workspace_bytes, ..._plan
 *            and ..._saved_bytes are as in linear_cross_entropy.cuh. An example with NCCL is in examples/parallel.
 * States     Those of cross_entropy_parallel.cuh, of tokens. backward counts a mean's tokens by itself.
 * Needs      linear_cross_entropy.cuh, cross_entropy_parallel.cuh, lk_ranks.cuh and what these need.
 * Options    Those of linear_cross_entropy.cuh. Each rank has a plan of its own: PANELS or FUSED, never CHUNKS. forward_backward is
 *            forward and backward in one workspace: 3 matmuls where the exponentials of this rank's columns fit (FUSED; without
 *            label_smoothing, entropy, argmax and dentropy), else 4. With one panel the matmul behind parallel.reduce is all of
 *            dweight. PANELS with max_counted computes dweight before dx.
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

/* ---- A call of a rank, of any loss --------------------------------------------------------------------------------------- */

/* A call of a rank while it is launched, or while its plan is asked for. A loss fills in the first part, and then calls
 * lk_lce_run_ranks or lk_lce_query_ranks; from there on the struct stays where it is. */
typedef struct lk_lce_ranks {
    const char *op;
    cudaStream_t stream;
    lk_checks checks;           /* with the fields that the loss does not take */
    const lk_lce_args *given;   /* the head's arguments, as the caller has them */
    lk_vocab_parallel parallel; /* as the caller has it */
    lk_lce_rank rank;           /* the caller's states, or NULL; later their place. Steps get it without all_gather */
    const void *all_states;     /* likewise */
    int64_t row_bytes;          /* of a token's state and what lies behind it */
    int unit;                   /* bytes of an element of the states */
    lk_lce_rows rows;
    /* Validates the call and sets `call` and `planner`, as lk_lce_check does. It may take from `arena`, and change `args`. */
    lk_status (*check)(struct lk_lce_ranks *r, lk_direction direction, bool query, lk_head_planner *planner);
    /* finish, with the results and the workspace of `forward`; query: only the bytes that it needs of that. */
    lk_status (*finish)(const struct lk_lce_ranks *r, bool query, size_t *bytes);

    lk_lce_added more;
    lk_lce_args args, forward, backward; /* args: what the head gets; then of both steps, where a call gathers */
    lk_lce_call call;                    /* the whole call */
    lk_arena arena;                      /* what lies in the workspace before the memory of the steps */
    size_t fixed, of_finish;             /* its bytes; those of finish, which runs between the steps, in their memory */
    size_t least;                        /* the smallest workspace of a call that gathers */
    size_t saved, least_saving; /* the bytes of exponentials, and the smallest workspace with them; 0: they cannot be kept */
} lk_lce_ranks;

/* What all losses fill in alike. Args: the struct of the call; given: the head's arguments in it. */
template <class Args>
LK_HOST lk_lce_ranks lk_lce_ranks_of(const char *op, const Args *x, const lk_lce_args *given, cudaStream_t stream)
{
    lk_lce_ranks r = {};
    r.op = op, r.stream = stream, r.checks.op = op, r.given = given, r.args = r.forward = *given, r.parallel = x->parallel;
    r.rank = {x->parallel, x->states, NULL}, r.all_states = x->all_states, r.unit = 16;
    return r;
}

/* Checks `parallel` and finds the place of the states, which `more` shows to the checks. */
LK_HOST lk_status lk_lce_place_states(lk_lce_ranks *r, lk_direction direction)
{
    const lk_lce_args &a = *r->given;
    lk_ranks_check(&r->checks, r->parallel, a.vocab, direction);
    if (r->checks.status) return r->checks.status; /* before sizes are computed of it */
    r->arena = {(uintptr_t)lk_head_base(a.workspace), 0, 256};
    lk_ranks_place(r->parallel, direction, a.tokens, r->row_bytes, 4, r->unit, &r->arena, &r->rank.states, &r->all_states,
                   &r->more.states);
    r->rank.others = (float *)r->rank.states, r->more.rank = &r->rank;
    return LK_OK;
}

/* Fills in the call of a step and begins its plan. */
template <class T>
LK_HOST lk_status lk_lce_begin_step(const lk_lce_ranks *r, lk_direction step, bool query, lk_lce_call *call,
                                    lk_head_planner *planner)
{
    lk_lce_copy_args<T>(step == LK_FORWARD ? &r->forward : &r->backward, step, &r->rank, call);
    call->no_panels = !r->rows.panel;
    return lk_lce_begin<T>(r->op, query, call, planner);
}

/* The smallest workspace of the steps. */
template <class T> LK_HOST lk_status lk_lce_steps_least(const lk_lce_ranks *r, bool gradients, size_t *least)
{
    lk_lce_call call;
    lk_head_planner planner;
    lk_status status = LK_OK;
    *least = r->of_finish;
    for (int i = 0; i <= gradients && !status; i++) {
        status = lk_lce_begin_step<T>(r, i ? LK_BACKWARD : LK_FORWARD, true, &call, &planner);
        if (!status && *least < planner.least) *least = planner.least;
    }
    return status;
}

/* The steps of a call that gathers and is checked: the states, finish, and for gradients backward, in one workspace. They share
 * what the arena has. forward_backward keeps the exponentials of all logits if they fit, as with `saved`; then its backward has
 * no matmul for logits. */
template <class T> LK_HOST lk_status lk_lce_divide(lk_lce_ranks *r, lk_direction direction)
{
    const bool both = direction == LK_BOTH;
    const int64_t tokens = r->given->tokens;
    lk_arena *const arena = &r->arena;
    size_t least = 0;
    lk_lce_put_strides(&r->args, r->call.a);
    lk_lce_args &f = r->forward = r->args, &b = r->backward = r->args;
    r->rank.parallel.all_gather = NULL;
    if (both) {
        f.batch_invariant = 0, f.saved = NULL; /* forward_backward has none */
        if (!f.lse) lk_take(&f.lse, arena, true, tokens);
        if (!f.lse_low) lk_take(&f.lse_low, arena, true, tokens);
        if (f.dentropy && !f.entropy) lk_take(&f.entropy, arena, true, tokens);
    }
    b.lse = f.lse, b.lse_low = f.lse_low, b.entropy = f.entropy, b.saved = NULL;
    b.bad_targets = NULL; /* finish has counted them */
    r->fixed = arena->used ? arena->used + 256 : 0;
    lk_status status = r->finish(r, true, &r->of_finish);
    if (r->of_finish) r->of_finish += 256; /* wherever the workspace begins */
    if (!status) status = lk_lce_steps_least<T>(r, both && r->call.gradient, &least);
    r->least = r->fixed + least;
    const lk_head_shape shape = lk_lce_shape_of(&r->call);
    if (status || !both || !r->call.fused || !lk_head_keeps(&shape) || f.vocab == 0 || tokens == 0) return status;
    f.saved = b.saved = (void *)(arena->base + arena->used); /* only to see what they need then */
    status = lk_lce_steps_least<T>(r, true, &least);
    r->saved = lk_lce_saved_size(&r->call), r->least_saving = r->fixed + r->saved + least;
    f.saved = b.saved = NULL;
    return status;
}

/* Checks a call other than finish. planner: of a call that does not gather; of the others the steps have plans. */
template <class T>
LK_HOST lk_status lk_lce_begin_ranks(lk_lce_ranks *r, lk_direction direction, bool query, lk_head_planner *planner)
{
    const bool gathers = lk_ranks_gathers(r->parallel, direction);
    lk_status status = lk_lce_place_states(r, direction);
    if (!status) status = r->check(r, direction, query, gathers ? NULL : planner);
    return status || !gathers ? status : lk_lce_divide<T>(r, direction);
}

/* Gives the steps what is left of a workspace of so many bytes. */
LK_HOST void lk_lce_share(lk_lce_ranks *r, size_t bytes)
{
    char *const base = lk_head_base(r->given->workspace) + (r->fixed ? r->fixed - 256 : 0);
    const size_t kept = bytes >= r->least_saving ? r->saved : 0;
    if (kept) r->forward.saved = r->backward.saved = base;
    for (lk_lce_args *step : {&r->forward, &r->backward}) {
        step->workspace = base + kept;
        step->workspace_bytes = bytes - r->fixed - kept;
    }
}

template <class T> LK_HOST lk_status lk_lce_step(void *of, lk_direction step)
{
    const lk_lce_ranks *const r = (const lk_lce_ranks *)of;
    lk_lce_call call;
    lk_head_planner planner;
    if (step == LK_FINISH) return r->finish(r, false, NULL);
    if (step == LK_BACKWARD && !r->call.gradient) return LK_OK;
    const lk_status status = lk_lce_begin_step<T>(r, step, false, &call, &planner);
    return status ? status : lk_lce_launch<T>(r->op, call, &planner, step, r->stream, r->rows);
}

/* All calls. finish: the results from the states of all ranks, which the caller has gathered. */
template <class T> LK_HOST lk_status lk_lce_run_ranks(lk_lce_ranks *r, lk_direction direction)
{
    if (direction == LK_FINISH) return r->finish(r, false, NULL);
    const lk_lce_args &a = *r->given;
    lk_head_planner planner;
    const lk_status status = lk_lce_begin_ranks<T>(r, direction, false, &planner);
    if (status) return status;
    if (!lk_ranks_gathers(r->parallel, direction))
        return lk_lce_launch<T>(r->op, r->call, &planner, direction, r->stream, r->rows);
    lk_check_workspace(&r->checks, a.workspace, a.workspace_bytes, r->least);
    if (r->checks.status) return r->checks.status;
    lk_lce_share(r, a.workspace_bytes);
    const lk_ranks ranks = {r->op, r->stream, r->parallel, a.vocab, r->rank.states, r->all_states,
                            (size_t)(a.tokens * r->row_bytes), 1, lk_lce_step<T>, r};
    return lk_ranks_run(&ranks, direction);
}

/* The plan within the budget. least: if the smallest plan needs more than the budget, that plan. */
template <class T>
LK_HOST lk_status lk_lce_query_ranks(lk_lce_ranks *r, lk_direction direction, size_t budget, bool least,
                                     lk_linear_cross_entropy_plan *plan)
{
    lk_lce_call call;
    lk_head_planner planner;
    lk_head_plan of[2] = {};
    lk_status status = lk_lce_begin_ranks<T>(r, direction, true, &planner);
    if (status) return status;
    if (!lk_ranks_gathers(r->parallel, direction))
        return lk_lce_query_planner(r->op, &planner, r->arena.used, budget, least, plan);
    if (budget < r->least && !least)
        return lk_fail(LK_ERR_WORKSPACE, r->op, "the budget is %zu; this call needs a workspace of %zu bytes", budget,
                       r->least);
    if (budget < r->least) budget = r->least;
    lk_lce_share(r, budget);
    const bool both = direction == LK_BOTH && r->call.gradient;
    const size_t left = r->forward.workspace_bytes;
    for (int i = 0; i <= both && !status; i++) {
        status = lk_lce_begin_step<T>(r, i ? LK_BACKWARD : LK_FORWARD, true, &call, &planner);
        if (!status) lk_head_choose(&planner, left, &of[i]);
    }
    if (status) return status;
    size_t most = r->of_finish;
    for (const lk_head_plan &p : of) most = p.workspace_bytes > most ? p.workspace_bytes : most;
    *plan = lk_lce_answer(&planner, &of[both]);
    plan->workspace_bytes = budget - left + most, plan->minimum_bytes = r->least;
    plan->matmuls = of[0].matmuls + of[1].matmuls;
    char text[sizeof plan->text];
    memcpy(text, plan->text, sizeof text);
    if (both)
        snprintf(plan->text, sizeof plan->text, "forward with %d matmul%s, then backward: %.240s", of[0].matmuls,
                 of[0].matmuls == 1 ? "" : "s", text);
    return LK_OK;
}

/* ---- Labels -------------------------------------------------------------------------------------------------------------- */

template <class T>
LK_HOST lk_status lk_lce_labels_check(lk_lce_ranks *r, lk_direction direction, bool query, lk_head_planner *planner)
{
    return lk_lce_check<T>(r->op, r->given, direction, query, &r->call, planner, &r->more);
}

template <class T> LK_HOST lk_status lk_lce_labels_finish(const lk_lce_ranks *r, bool query, size_t *bytes)
{
    const lk_cross_entropy_parallel_args f = {lk_lce_finish_args(&r->forward), r->parallel, r->rank.states, r->all_states};
    return query ? lk_cross_entropy_parallel_query<T>(r->op, &f, LK_FINISH, bytes)
                 : lk_ce_ranks_finish<T>(r->op, &f, r->stream);
}

template <class T>
LK_HOST lk_lce_ranks lk_lce_labels_of(const char *op, const lk_linear_cross_entropy_parallel_args *x, lk_direction direction,
                                      cudaStream_t stream)
{
    const lk_lce_args &a = x->common;
    lk_lce_ranks r = lk_lce_ranks_of(op, x, &a, stream);
    r.row_bytes = lk_ce_ranks_state_bytes(&a, direction), r.unit = a.statistics ? 8 : 16;
    r.rows = lk_lce_labels<T>(&a), r.check = lk_lce_labels_check<T>, r.finish = lk_lce_labels_finish<T>;
    lk_cross_entropy_check_statistics(&r.checks, &a, direction == LK_FORWARD || direction == LK_FINISH);
    return r;
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_linear_cross_entropy_parallel_run(const char *op, const lk_linear_cross_entropy_parallel_args *args,
                                                       cudaStream_t stream)
{
    lk_lce_ranks r = lk_lce_labels_of<T>(op, args, direction, stream);
    return lk_lce_run_ranks<T>(&r, direction);
}

template <class T>
LK_HOST lk_status lk_linear_cross_entropy_parallel_query_plan(const char *op, const lk_linear_cross_entropy_parallel_args *args,
                                                              lk_direction direction, size_t budget, bool least,
                                                              lk_linear_cross_entropy_plan *plan)
{
    lk_lce_ranks r = lk_lce_labels_of<T>(op, args, direction, NULL);
    return lk_lce_query_ranks<T>(&r, direction, budget, least, plan);
}

/* Of finish, which has no plan. */
template <class T>
LK_HOST lk_status lk_linear_cross_entropy_parallel_query(const char *op, const lk_linear_cross_entropy_parallel_args *args,
                                                         lk_direction direction, size_t *bytes)
{
    const lk_lce_ranks r = lk_lce_labels_of<T>(op, args, direction, NULL);
    return r.finish(&r, true, bytes);
}

template <class T>
LK_HOST lk_status lk_linear_cross_entropy_parallel_query_saved(const char *op, const lk_linear_cross_entropy_parallel_args *args,
                                                               size_t *bytes)
{
    lk_lce_ranks r = lk_lce_labels_of<T>(op, args, LK_FORWARD, NULL);
    const lk_status status = lk_lce_place_states(&r, LK_FORWARD);
    return status ? status : lk_lce_saved_bytes<T>(op, &args->common, bytes, &r.more);
}

#endif /* CUDA or the simulator */
#endif

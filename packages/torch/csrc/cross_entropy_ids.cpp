// SPDX-License-Identifier: MIT
// cross_entropy_ids, on one device or with the classes split over the ranks of a group: lk/cross_entropy_ids.cuh and
// lk/cross_entropy_ids_parallel.cuh.
#include "lk_torch.h"

#include "lk/cross_entropy_ids_parallel.cuh"
LK_DECLARE_ALL(CROSS_ENTROPY_IDS)
LK_DECLARE_ALL(CROSS_ENTROPY_IDS_PARALLEL)

namespace lk_torch {

// The arguments that all calls have, and what keeps their memory. label_smoothing is one of LK_LOSS_PARAMETERS; lk refuses it.
struct IdsCall {
    lk_cross_entropy_ids_parallel_args split = {}; // `parallel` where the classes are
    lk_cross_entropy_ids_args &a = split.common;
    Stream stream;
    Rows logits;
    Tensor ids, weight, of_tail, unused, divisor, factors;
    IdsCall(const Tensor &x, const Tensor &target_ids, const Maybe &target_weight, const Maybe &tail_weight, LK_LOSS_PARAMETERS)
        : stream((check_input(x, "input"), x)), logits(x, "input")
    {
        a.ids_per_row = fill_ids(a.common, x, target_ids, target_weight, &ids, &weight);
        a.target_ids = ids.const_data_ptr(), a.target_weight = weight.defined() ? weight.const_data_ptr<float>() : nullptr;
        a.tail_weight = fill_tail(x, tail_weight, &of_tail);
        fill_loss(a.common, x, {}, logits.cols, &unused, &divisor, &factors, LK_LOSS_OPTIONS);
        a.common.logits = logits.data(), a.common.logits_stride = logits.stride;
        a.common.rows = logits.rows, a.common.vocab = logits.cols;
    }
};

// What backward needs, in one tensor: for mean valid_rows (two floats' bytes), then lse and lse_low; with ranks others too. Its
// size is a multiple of 8 bytes, as in cross_entropy.
static int64_t state_head(int64_t reduction) { return reduction == LK_REDUCTION_MEAN ? 2 : 0; }
static Tensor make_state(const Tensor &x, int64_t reduction, int64_t floats)
{
    return make({state_head(reduction) + (floats + 1) / 2 * 2}, x, at::kFloat);
}
static void set_state(IdsCall &c, const Tensor &state)
{
    lk_cross_entropy_args &a = c.a.common;
    float *f = (float *)state.const_data_ptr();
    const int64_t head = state_head(a.reduction);
    if (head) a.valid_rows = (int64_t *)f;
    a.lse = f + head, a.lse_low = f + head + a.rows;
    if (c.split.parallel.vocab_total) c.split.states = f + head + 2 * a.rows;
}

// loss, logp, tail, and what backward needs. want_tail: tail is not undefined.
static tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_ids_forward(const Tensor &logits, const Tensor &target_ids,
                                                                       const Maybe &target_weight, const Maybe &tail_weight,
                                                                       LK_LOSS_PARAMETERS, bool want_tail)
{
    IdsCall c(logits, target_ids, target_weight, tail_weight, LK_LOSS_OPTIONS);
    lk_cross_entropy_args &a = c.a.common;
    const Tensor tail = make_tail(logits, want_tail, &c.a.tail);
    Tensor loss = make(reduction ? at::IntArrayRef() : logits.sizes().slice(0, logits.dim() - 1), logits, at::kFloat);
    Tensor logp = make(target_ids.sizes(), logits, at::kFloat);
    Tensor state = make_state(logits, reduction, 2 * a.rows);
    set_state(c, state);
    a.loss = loss.mutable_data_ptr<float>(), c.a.logp = logp.mutable_data_ptr<float>();
    LK_RUN(lk_cross_entropy_ids_forward_workspace_bytes, logits, &c.a, &a.workspace_bytes);
    const Workspace workspace(a.workspace_bytes);
    a.workspace = workspace.start;
    LK_RUN(lk_cross_entropy_ids_forward, logits, &c.a, c.stream);
    return {loss, logp, tail, state};
}

// c: with its part of the classes, where they are split over ranks.
static Tensor run_backward(IdsCall &c, const Maybe &dloss, const Maybe &dlogp, const Maybe &dtail, const Maybe &tail,
                           const Tensor &logits, const Tensor &state)
{
    lk_cross_entropy_args &a = c.a.common;
    const Tensor saved = aligned(state);
    const Maybe up = packed(dloss), dp = packed(dlogp), dt = packed(dtail), t = packed(tail); // lk's NULL upstream is 0 beside dp, dt
    Tensor d = make_gradient(c.logits, &a.dlogits_stride);
    set_state(c, saved);
    if (has(up)) a.upstream = up->const_data_ptr<float>(), a.upstream_per_row = a.reduction == LK_REDUCTION_NONE;
    if (has(dp)) c.a.dlogp = dp->const_data_ptr<float>();
    if (has(dt)) c.a.dtail = dt->const_data_ptr<float>();
    if (has(t)) c.a.tail = (float *)t->const_data_ptr();
    a.dlogits = d.mutable_data_ptr();
    const bool ranks = c.split.parallel.vocab_total;
    if (ranks) LK_RUN(lk_cross_entropy_ids_parallel_backward_workspace_bytes, logits, &c.split, &a.workspace_bytes);
    else LK_RUN(lk_cross_entropy_ids_backward_workspace_bytes, logits, &c.a, &a.workspace_bytes);
    const Workspace workspace(a.workspace_bytes);
    a.workspace = workspace.start;
    if (ranks) LK_RUN(lk_cross_entropy_ids_parallel_backward, logits, &c.split, c.stream);
    else LK_RUN(lk_cross_entropy_ids_backward, logits, &c.a, c.stream);
    return d;
}
static Tensor cross_entropy_ids_backward(const Maybe &dloss, const Maybe &dlogp, const Maybe &dtail, const Tensor &logits,
                                         const Tensor &target_ids, const Maybe &target_weight, const Maybe &tail_weight,
                                         const Maybe &tail, const Tensor &state, LK_LOSS_PARAMETERS)
{
    IdsCall c(logits, target_ids, target_weight, tail_weight, LK_LOSS_OPTIONS);
    return run_backward(c, dloss, dlogp, dtail, tail, logits, state);
}

// loss, logp and tail, the same bits on every rank, and what backward needs. One all-gather, of 16 bytes a row and of each id's
// logit.
static tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_ids_parallel_forward(const Tensor &logits, const Tensor &target_ids,
                                                                                const Maybe &target_weight,
                                                                                const Maybe &tail_weight, LK_LOSS_PARAMETERS,
                                                                                LK_RANKS_PARAMETERS, bool want_tail)
{
    IdsCall c(logits, target_ids, target_weight, tail_weight, LK_LOSS_OPTIONS);
    lk_cross_entropy_args &a = c.a.common;
    fill_slice(c.split, c.logits.cols, "input", " classes", LK_SHARDS);
    const Tensor tail = make_tail(logits, want_tail, &c.a.tail);
    Tensor loss = make(reduction ? at::IntArrayRef() : logits.sizes().slice(0, logits.dim() - 1), logits, at::kFloat);
    Tensor logp = make(target_ids.sizes(), logits, at::kFloat);
    Tensor state = make_state(logits, reduction, 3 * a.rows);
    const int64_t floats = 4 + (c.a.ids_per_row * (int64_t)logits.element_size() + 15) / 16 * 4;
    const Tensor states = make({slices * a.rows, floats}, logits, at::kFloat);
    const auto take = [&](int64_t first, int64_t count) {
        a.logits = element(c.logits.t, c.logits.data(), first), a.vocab = count, a.logits_stride = c.logits.distance();
    };
    run_slices(c.split, LK_SHARDS, states, take, [&] {
        LK_RUN(lk_cross_entropy_ids_parallel_forward_workspace_bytes, logits, &c.split, &a.workspace_bytes);
        const Workspace workspace(a.workspace_bytes);
        a.workspace = workspace.start;
        LK_RUN(lk_cross_entropy_ids_parallel_forward, logits, &c.split, c.stream);
    });
    const Tensor all = gather_states(states, LK_RANKS);
    set_state(c, state);
    c.split.all_states = all.const_data_ptr();
    a.loss = loss.mutable_data_ptr<float>(), c.a.logp = logp.mutable_data_ptr<float>();
    LK_RUN(lk_cross_entropy_ids_parallel_finish_workspace_bytes, logits, &c.split, &a.workspace_bytes);
    const Workspace workspace(a.workspace_bytes);
    a.workspace = workspace.start;
    LK_RUN(lk_cross_entropy_ids_parallel_finish, logits, &c.split, c.stream);
    return {loss, logp, tail, state};
}

static Tensor cross_entropy_ids_parallel_backward(const Maybe &dloss, const Maybe &dlogp, const Maybe &dtail, const Tensor &logits,
                                                  const Tensor &target_ids, const Maybe &target_weight, const Maybe &tail_weight,
                                                  const Maybe &tail, const Tensor &state, LK_LOSS_PARAMETERS,
                                                  LK_SHARDS_PARAMETERS)
{
    IdsCall c(logits, target_ids, target_weight, tail_weight, LK_LOSS_OPTIONS);
    fill_slice(c.split, c.logits.cols, "input", " classes", LK_SHARDS);
    return run_backward(c, dloss, dlogp, dtail, tail, logits, state);
}

struct CrossEntropyIdsBackward : Node {
    SavedVariable logits, ids, weight, of_tail, tail, state, divisor, factors;
    int64_t reduction, ignore_index;
    double label_smoothing, z_loss, softcap, logit_scale;
    bool zero_when_empty, has_tail = false;
    std::vector<int64_t> shards; // empty: the classes are not split
    int64_t rank = 0, slices = 1;
    variable_list apply(variable_list &&up) override
    {
        LK_OP(cross_entropy_ids_backward);
        LK_OP(cross_entropy_ids_parallel_backward);
        const std::lock_guard<std::mutex> lock(mutex_);
        const Maybe dtail = has_tail ? maybe(up[2]) : Maybe();
        if (!up[0].defined() && !up[1].defined() && !has(dtail)) return variable_list(1);
        const Tensor t = has_tail ? tail.unpack(held(this)) : Tensor(), by = of_tail.unpack();
        const Tensor x = logits.unpack(), i = ids.unpack(), w = weight.unpack(), s = state.unpack();
        const Maybe denominator = maybe(divisor.unpack()), row_weight = maybe(factors.unpack());
        const Below below;
        if (!shards.empty())
            return once(*this, up,
                        {cross_entropy_ids_parallel_backward_op.call(maybe(up[0]), maybe(up[1]), dtail, x, i, maybe(w), maybe(by),
                                                                     maybe(t), s, LK_LOSS_OPTIONS, LK_SHARDS)},
                        "cross_entropy_ids");
        return once(*this, up,
                    {cross_entropy_ids_backward_op.call(maybe(up[0]), maybe(up[1]), dtail, x, i, maybe(w), maybe(by), maybe(t), s,
                                                        LK_LOSS_OPTIONS)}, "cross_entropy_ids");
    }
    void release_variables() override
    {
        logits.reset_data(), ids.reset_data(), weight.reset_data(), state.reset_data();
        divisor.reset_data(), factors.reset_data(), of_tail.reset_data(), tail.reset_data();
    }
    void keep(const Tensor &logits, const Tensor &target_ids, const Maybe &target_weight, const Maybe &tail_weight,
              const Tensor &tail, const Tensor &state, LK_LOSS_PARAMETERS)
    {
        has_tail = tail.defined(), of_tail = save(tail_weight);
        if (has_tail) this->tail = SavedVariable(tail, true);
        this->logits = save(logits), ids = save(target_ids), weight = save(target_weight), this->state = save(state);
        divisor = save(denominator), factors = save(row_weight);
        this->reduction = reduction, this->ignore_index = ignore_index, this->label_smoothing = label_smoothing;
        this->z_loss = z_loss, this->softcap = softcap, this->logit_scale = logit_scale;
        this->zero_when_empty = zero_when_empty;
    }
};

static void check_ids(const Tensor &logits, const Tensor &target_ids, const Maybe &target_weight, const Maybe &tail_weight,
                      const Maybe &denominator, const Maybe &row_weight)
{
    check_input(logits, "input"), check_constants(target_ids, {}, denominator, row_weight);
    TORCH_CHECK_VALUE(!wants_gradient(target_weight), "lk: target_weight requires a gradient, and gets none; detach it, or build "
                      "the loss of logp, which has one");
    TORCH_CHECK_VALUE(!wants_gradient(tail_weight), "lk: tail_weight requires a gradient, and gets none; detach it, or build the "
                      "loss of tail, which has one");
}

tuple<Tensor, Tensor, Tensor> cross_entropy_ids(const Tensor &logits, const Tensor &target_ids, const Maybe &target_weight,
                                                const Maybe &tail_weight, LK_LOSS_PARAMETERS, bool want_tail)
{
    LK_OP(cross_entropy_ids_forward);
    check_ids(logits, target_ids, target_weight, tail_weight, denominator, row_weight);
    want_tail = want_tail || has(tail_weight); // backward reads it
    const auto node = wants_gradient(logits) ? make_node<CrossEntropyIdsBackward>(logits) : nullptr;
    Tensor loss, logp, tail, state;
    {
        const Below below;
        std::tie(loss, logp, tail, state) =
            cross_entropy_ids_forward_op.call(logits, target_ids, target_weight, tail_weight, LK_LOSS_OPTIONS, want_tail);
    }
    if (!want_tail) tail.reset();
    if (!node) return {loss, logp, tail};
    for (const Tensor &out : {loss, logp}) torch::autograd::set_history(out, node);
    if (want_tail) torch::autograd::set_history(tail, node);
    node->keep(logits, target_ids, target_weight, tail_weight, tail, state, LK_LOSS_OPTIONS);
    node_is_made(node);
    return {loss, logp, tail};
}

// The classes split over ranks. Backward has no collective.
static tuple<Tensor, Tensor, Tensor> cross_entropy_ids_parallel(const Tensor &logits, const Tensor &target_ids,
                                                                const Maybe &target_weight, const Maybe &tail_weight,
                                                                LK_LOSS_PARAMETERS, LK_RANKS_PARAMETERS, bool want_tail)
{
    LK_OP(cross_entropy_ids_parallel_forward);
    check_ids(logits, target_ids, target_weight, tail_weight, denominator, row_weight);
    want_tail = want_tail || has(tail_weight); // backward reads it
    const auto node = wants_gradient(logits) ? make_node<CrossEntropyIdsBackward>(logits) : nullptr;
    Tensor loss, logp, tail, state;
    {
        const Below below;
        std::tie(loss, logp, tail, state) = cross_entropy_ids_parallel_forward_op.call(
            logits, target_ids, target_weight, tail_weight, LK_LOSS_OPTIONS, LK_RANKS, want_tail);
    }
    if (!want_tail) tail.reset();
    if (!node) return {loss, logp, tail};
    for (const Tensor &out : {loss, logp}) torch::autograd::set_history(out, node);
    if (want_tail) torch::autograd::set_history(tail, node);
    node->shards = shards.vec(), node->rank = rank, node->slices = slices;
    node->keep(logits, target_ids, target_weight, tail_weight, tail, state, LK_LOSS_OPTIONS);
    node_is_made(node);
    return {loss, logp, tail};
}

#define INPUTS "Tensor logits, Tensor target_ids, Tensor? target_weight, Tensor? tail_weight, "
LK_OPS(m)
{
    user_op(m, "cross_entropy_ids_parallel",
            "(" INPUTS LK_LOSS_SCHEMA LK_RANKS_SCHEMA ", bool want_tail) -> (Tensor, Tensor, Tensor)", &cross_entropy_ids_parallel);
    kernel(m, "cross_entropy_ids_parallel_forward",
           "(" INPUTS LK_LOSS_SCHEMA LK_RANKS_SCHEMA ", bool want_tail) -> (Tensor, Tensor, Tensor, Tensor)",
           &cross_entropy_ids_parallel_forward);
    kernel(m, "cross_entropy_ids_parallel_backward", "(Tensor? dloss, Tensor? dlogp, Tensor? dtail, " INPUTS "Tensor? tail, "
           "Tensor state, " LK_LOSS_SCHEMA LK_SHARDS_SCHEMA ") -> Tensor", &cross_entropy_ids_parallel_backward);
    user_op(m, "cross_entropy_ids", "(" INPUTS LK_LOSS_SCHEMA ", bool want_tail) -> (Tensor, Tensor, Tensor)", &cross_entropy_ids);
    kernel(m, "cross_entropy_ids_forward", "(" INPUTS LK_LOSS_SCHEMA ", bool want_tail) -> (Tensor, Tensor, Tensor, Tensor)",
           &cross_entropy_ids_forward);
    kernel(m, "cross_entropy_ids_backward", "(Tensor? dloss, Tensor? dlogp, Tensor? dtail, " INPUTS "Tensor? tail, Tensor state, "
           LK_LOSS_SCHEMA ") -> Tensor", &cross_entropy_ids_backward);
}

} // namespace lk_torch

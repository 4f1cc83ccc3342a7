// SPDX-License-Identifier: MIT
// linear_cross_entropy_ids, on one device or with the classes split over the ranks of a group: lk/linear_cross_entropy_ids.cuh and
// lk/linear_cross_entropy_ids_parallel.cuh.
#include "lk_torch.h"

#include <algorithm>

#include <ATen/autocast_mode.h>

#include "lk/linear_cross_entropy_ids_parallel.cuh"
LK_DECLARE_ALL(LINEAR_CROSS_ENTROPY)
LK_DECLARE_ALL(LINEAR_CROSS_ENTROPY_IDS)
LK_DECLARE_ALL(LINEAR_CROSS_ENTROPY_IDS_PARALLEL)

namespace lk_torch {

// label_smoothing is one of LK_LOSS_PARAMETERS; lk refuses it.
#define PARAMETERS                                                                                                             \
    const Tensor &x, const Tensor &weight, const Tensor &target_ids, const Maybe &target_weight, const Maybe &tail_weight,     \
        const Maybe &bias, LK_LOSS_PARAMETERS, int64_t workspace_mib, bool fast_logits, int64_t max_counted
#define OPTIONS LK_LOSS_OPTIONS, workspace_mib, fast_logits, max_counted

// The arguments that all calls have, and what keeps their memory.
struct HeadIdsCall {
    lk_linear_cross_entropy_ids_parallel_args split = {}; // `parallel` where the classes are
    lk_linear_cross_entropy_ids_args &a = split.common;
    Stream stream;
    HeadInput input;
    Rows rows, columns;
    Tensor ids, ids_weight, of_tail, b, unused, divisor, factors, dx, dweight, dbias;
    size_t budget, backward_least = 0;
    std::string group;
    HeadIdsCall(PARAMETERS, const std::string &group = {}, at::IntArrayRef shards = {}, int64_t rank = 0, int64_t slices = 1,
                int64_t parts = 1)
        : stream((check_input(x, "input"), x)), input(x, parts, group), rows(head_rows(input.all, "input")),
          columns(weight_beside(weight, x, "linear_weight", &a.common.dweight_dtype), "linear_weight"),
          group(group)
    {
        lk_linear_cross_entropy_args &c = a.common;
        TORCH_CHECK_VALUE(weight.dim() == 2 && columns.cols == rows.cols, "lk: linear_weight has shape ", weight.sizes(),
                          "; it must be [classes, ", rows.cols, "]");
        TORCH_CHECK_VALUE(workspace_mib >= 0, "lk: workspace_mib is ", workspace_mib, "; it must be at least 1");
        if (!shards.empty()) fill_slice(split, columns.rows, "linear_weight", " rows", LK_SHARDS);
        a.ids_per_row = fill_ids(c, input.all, target_ids, target_weight, &ids, &ids_weight);
        a.target_ids = ids.const_data_ptr(), a.target_weight = ids_weight.defined() ? ids_weight.const_data_ptr<float>() : nullptr;
        a.tail_weight = fill_tail(input.all, tail_weight, &of_tail);
        fill_loss(c, input.all, {}, columns.rows, &unused, &divisor, &factors, LK_LOSS_OPTIONS);
        if (has(bias)) {
            TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == columns.rows, "lk: linear_bias has shape ", bias->sizes(),
                              "; it must be [", columns.rows, "]");
            b = bias->contiguous();
            c.bias = b.const_data_ptr(), c.bias_dtype = type_beside(b, x.scalar_type(), "linear_bias");
        }
        c.x = rows.data(), c.x_stride = rows.stride, c.tokens = rows.rows, c.hidden = rows.cols;
        c.weight = columns.data(), c.weight_stride = columns.stride, c.vocab = columns.rows, c.fast_logits = fast_logits;
        c.max_counted = max_counted;
        c.tf32 = x.scalar_type() == at::kFloat && at::globalContext().allowTF32CuBLAS();
        budget = (size_t)workspace_mib << 20;
    }
    void take_columns(int64_t first, int64_t count)
    {
        a.common.weight = element(columns.t, columns.data(), first * columns.distance()), a.common.vocab = count;
        if (b.defined()) a.common.bias = element(b, b.const_data_ptr(), first);
    }
    // Of forward: what backward will need for these gradients, also where the upstream gradients of all outputs come.
    void expect_backward(const Tensor &x, int64_t reduction, bool want_dx, bool want_dweight, bool want_dbias, bool want_tail,
                         bool ranks)
    {
        if (!budget || !(want_dx || want_dweight || want_dbias)) return;
        lk_linear_cross_entropy_ids_parallel_args whole = split;
        lk_linear_cross_entropy_ids_args &back = whole.common;
        lk_linear_cross_entropy_args &c = back.common;
        lk_linear_cross_entropy_plan plan = {};
        const auto some = (const float *)&back;
        c.dx = want_dx ? &back : nullptr, c.dweight = want_dweight ? &back : nullptr;
        if (want_dbias) c.dbias = &back, c.dbias_dtype = c.bias_dtype;
        c.upstream = back.dlogp = some, c.upstream_per_token = !reduction;
        if (want_tail) back.dtail = some, back.tail = (float *)some;
        c.lse = (float *)some;
        if (ranks) LK_RUN(lk_linear_cross_entropy_ids_parallel_backward_plan, x, &whole, SIZE_MAX, &plan);
        else LK_RUN(lk_linear_cross_entropy_ids_backward_plan, x, &back, SIZE_MAX, &plan);
        backward_least = plan.minimum_bytes;
    }
};
// A budget of 0 is lk's own.
#define RUN(function, args, call, x)                                                                                           \
    do {                                                                                                                       \
        lk_linear_cross_entropy_plan plan = {};                                                                                \
        if (call.budget) {                                                                                                     \
            LK_RUN(function##_plan, x, args, SIZE_MAX, &plan);                                                                 \
            check_budget(call.budget, std::max(plan.minimum_bytes, call.backward_least));                                      \
        }                                                                                                                      \
        if (call.budget) LK_RUN(function##_plan, x, args, call.budget, &plan);                                                 \
        else LK_RUN(function##_workspace_bytes, x, args, &plan.workspace_bytes);                                               \
        const Workspace workspace(call.a.common.workspace_bytes = plan.workspace_bytes);                                       \
        call.a.common.workspace = workspace.start;                                                                             \
        call.input.gather();                                                                                                   \
        const Locked<lk_linear_cross_entropy_context> locked(x, lk_linear_cross_entropy_init);                                 \
        call.a.common.context = locked.context;                                                                                \
        LK_RUN(function, x, args, call.stream);                                                                                \
    } while (0)

// loss, logp, tail, lse, lse_low. want_tail: tail is not undefined.
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor> linear_cross_entropy_ids_forward(PARAMETERS, bool want_dx, bool want_dweight,
                                                                                       bool want_dbias, bool want_tail)
{
    HeadIdsCall c(x, weight, target_ids, target_weight, tail_weight, bias, OPTIONS);
    c.expect_backward(x, reduction, want_dx, want_dweight, want_dbias, want_tail, false);
    const at::IntArrayRef tokens = x.sizes().slice(0, x.dim() - 1);
    const Tensor loss = make(reduction ? at::IntArrayRef() : tokens, x, at::kFloat), lse = make(tokens, x, at::kFloat);
    const Tensor logp = make(target_ids.sizes(), x, at::kFloat), lse_low = make(tokens, x, at::kFloat);
    c.a.common.loss = loss.mutable_data_ptr<float>(), c.a.common.lse = lse.mutable_data_ptr<float>();
    c.a.common.lse_low = lse_low.mutable_data_ptr<float>();
    c.a.logp = logp.mutable_data_ptr<float>();
    const Tensor tail = make_tail(x, want_tail, &c.a.tail);
    RUN(lk_linear_cross_entropy_ids_forward, &c.a, c, x);
    return {loss, logp, tail, lse, lse_low};
}

// ranks: the classes are split over ranks.
static tuple<Tensor, Tensor, Tensor> run_backward(HeadIdsCall &c, const Maybe &dloss, const Maybe &dlogp, const Maybe &dtail,
                                                  const Tensor &lse, const Tensor &lse_low, const Maybe &tail, const Tensor &x,
                                                  const Tensor &weight, int64_t reduction, bool ranks, bool want_dx,
                                                  bool want_dweight, bool want_dbias)
{
    lk_linear_cross_entropy_args &a = c.a.common;
    const Maybe up = packed(dloss), dp = packed(dlogp), dt = packed(dtail), t = packed(tail);
    const Tensor l = lse.contiguous(), low = lse_low.contiguous();
    a.lse = (float *)l.const_data_ptr(), a.lse_low = (float *)low.const_data_ptr();
    // Beside dlogp and dtail lk takes a NULL upstream for 0.
    if (has(up)) a.upstream = up->const_data_ptr<float>(), a.upstream_per_token = !reduction;
    if (has(dp)) c.a.dlogp = dp->const_data_ptr<float>();
    if (has(dt)) c.a.dtail = dt->const_data_ptr<float>();
    if (has(t)) c.a.tail = (float *)t->const_data_ptr();
    if (want_dx) c.dx = make(a.tokens ? c.input.all.sizes() : x.sizes(), x), a.dx = c.dx.mutable_data_ptr();
    if (want_dweight) c.dweight = make(weight.sizes(), weight), a.dweight = c.dweight.mutable_data_ptr();
    if (want_dbias) c.dbias = make({a.vocab}, c.b), a.dbias = c.dbias.mutable_data_ptr(), a.dbias_dtype = a.bias_dtype;
    if (!want_dx && !want_dweight && !want_dbias) return {};
    if (!want_dx && !a.vocab) { // empty tensors, whose NULL lk would not take for an output
        c.input.gather();
        return {c.dx, c.dweight, c.dbias};
    }
    if (ranks) RUN(lk_linear_cross_entropy_ids_parallel_backward, &c.split, c, x);
    else RUN(lk_linear_cross_entropy_ids_backward, &c.a, c, x);
    return {c.dx, c.dweight, c.dbias};
}
static tuple<Tensor, Tensor, Tensor> linear_cross_entropy_ids_backward(const Maybe &dloss, const Maybe &dlogp, const Maybe &dtail,
                                                                       const Tensor &lse, const Tensor &lse_low, const Maybe &tail,
                                                                       PARAMETERS, bool want_dx, bool want_dweight, bool want_dbias)
{
    HeadIdsCall c(x, weight, target_ids, target_weight, tail_weight, bias, OPTIONS);
    return run_backward(c, dloss, dlogp, dtail, lse, lse_low, tail, x, weight, reduction, false, want_dx, want_dweight, want_dbias);
}

// loss, logp, tail, lse, lse_low, others: the same bits on every rank. One all-gather, of 16 bytes a token and of each id's logit.
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
linear_cross_entropy_ids_parallel_forward(PARAMETERS, LK_HEAD_RANKS_PARAMETERS, bool want_dx, bool want_dweight, bool want_dbias,
                                          bool want_tail)
{
    HeadIdsCall c(x, weight, target_ids, target_weight, tail_weight, bias, OPTIONS, LK_HEAD_RANKS);
    c.expect_backward(x, reduction, want_dx, want_dweight, want_dbias, want_tail, true);
    lk_linear_cross_entropy_args &a = c.a.common;
    const at::IntArrayRef tokens = c.input.all.sizes().slice(0, x.dim() - 1);
    const Tensor loss = make(reduction ? at::IntArrayRef() : tokens, x, at::kFloat), logp = make(target_ids.sizes(), x, at::kFloat);
    const Tensor lse = make(tokens, x, at::kFloat), lse_low = make(tokens, x, at::kFloat), others = make(tokens, x, at::kFloat);
    const int64_t bytes = c.a.ids_per_row * (fast_logits ? (int64_t)x.element_size() : 4);
    const Tensor states = make({slices * a.tokens, 4 + (bytes + 15) / 16 * 4}, x, at::kFloat);
    const Tensor tail = make_tail(c.input.all, want_tail, &c.a.tail);
    run_slices(c.split, LK_SHARDS, states, [&](int64_t first, int64_t count) { c.take_columns(first, count); },
               [&] { RUN(lk_linear_cross_entropy_ids_parallel_forward, &c.split, c, x); });
    const Tensor all = gather_states(states, LK_RANKS);
    c.split.all_states = all.const_data_ptr(), c.split.states = others.mutable_data_ptr(), a.loss = loss.mutable_data_ptr<float>(), c.a.logp = logp.mutable_data_ptr<float>();
    a.lse = lse.mutable_data_ptr<float>();
    a.lse_low = lse_low.mutable_data_ptr<float>();
    LK_RUN(lk_linear_cross_entropy_ids_parallel_finish_workspace_bytes, x, &c.split, &a.workspace_bytes);
    const Workspace workspace(a.workspace_bytes);
    a.workspace = workspace.start;
    LK_RUN(lk_linear_cross_entropy_ids_parallel_finish, x, &c.split, c.stream);
    return {loss, logp, tail, lse, lse_low, others};
}
static tuple<Tensor, Tensor, Tensor>
linear_cross_entropy_ids_parallel_backward(const Maybe &dloss, const Maybe &dlogp, const Maybe &dtail, const Tensor &lse,
                                           const Tensor &lse_low, const Maybe &tail, const Tensor &others, PARAMETERS,
                                           LK_HEAD_RANKS_PARAMETERS, bool want_dx, bool want_dweight, bool want_dbias)
{
    HeadIdsCall c(x, weight, target_ids, target_weight, tail_weight, bias, OPTIONS, LK_HEAD_RANKS);
    const Tensor o = others.contiguous();
    c.split.states = (void *)o.const_data_ptr(), c.split.parallel.user = &c;
    c.split.parallel.reduce = parts == 1 ? sum_dx<HeadIdsCall> : scatter_dx<HeadIdsCall>;
    const auto gradients =
        run_backward(c, dloss, dlogp, dtail, lse, lse_low, tail, x, weight, reduction, true, want_dx, want_dweight, want_dbias);
    if (want_dx) wait(c.dx);
    return gradients;
}

struct LinearCrossEntropyIdsBackward : Node {
    SavedVariable x, weight, ids, ids_weight, of_tail, bias, tail, lse, lse_low, others, divisor, factors;
    std::string group;
    std::vector<int64_t> shards; // empty: the classes are not split
    int64_t rank = 0, slices = 1, parts = 1;
    int64_t reduction, ignore_index, workspace_mib, max_counted;
    double label_smoothing, z_loss, softcap, logit_scale;
    bool zero_when_empty, fast_logits, has_tail = false;
    variable_list apply(variable_list &&up) override
    {
        LK_OP(linear_cross_entropy_ids_backward);
        LK_OP(linear_cross_entropy_ids_parallel_backward);
        const std::lock_guard<std::mutex> lock(mutex_);
        const Maybe dtail = has_tail ? maybe(up[2]) : Maybe();
        if (!up[0].defined() && !up[1].defined() && !has(dtail)) return variable_list(3);
        const Tensor in = x.unpack(), w = weight.unpack(), i = ids.unpack(), o = others.unpack();
        const Tensor l = lse.unpack(), low = lse_low.unpack();
        const Maybe t = has_tail ? maybe(tail.unpack(held(this))) : Maybe();
        const Maybe by = maybe(ids_weight.unpack()), tail_by = maybe(of_tail.unpack()), b = maybe(bias.unpack());
        const Maybe denominator = maybe(divisor.unpack()), row_weight = maybe(factors.unpack());
        const Below below;
        const bool wants[] = {task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
        auto [dx, dweight, dbias] =
            shards.empty() ? linear_cross_entropy_ids_backward_op.call(maybe(up[0]), maybe(up[1]), dtail, l, low, t, in, w, i,
                                                                      by, tail_by, b, OPTIONS, wants[0], wants[1], wants[2])
                          : linear_cross_entropy_ids_parallel_backward_op.call(
                                maybe(up[0]), maybe(up[1]), dtail, l, low, t, o, in, w, i, by, tail_by, b, OPTIONS, LK_HEAD_RANKS,
                                wants[0], wants[1], wants[2]);
        return once(*this, up, {dx, dweight, dbias}, "linear_cross_entropy_ids");
    }
    void release_variables() override
    {
        x.reset_data(), weight.reset_data(), ids.reset_data(), ids_weight.reset_data();
        bias.reset_data(), lse.reset_data(), lse_low.reset_data(), divisor.reset_data(), factors.reset_data();
        of_tail.reset_data(), tail.reset_data(), others.reset_data();
    }
    void keep(PARAMETERS, const Tensor &tail, const Tensor &lse, const Tensor &lse_low)
    {
        has_tail = tail.defined();
        if (has_tail) this->tail = SavedVariable(tail, true);
        this->x = save(x), this->weight = save(weight), ids = save(target_ids), ids_weight = save(target_weight);
        of_tail = save(tail_weight), this->bias = save(bias), this->lse = save(lse), this->lse_low = save(lse_low);
        divisor = save(denominator), factors = save(row_weight);
        this->reduction = reduction, this->ignore_index = ignore_index, this->label_smoothing = label_smoothing;
        this->z_loss = z_loss, this->softcap = softcap, this->logit_scale = logit_scale, this->zero_when_empty = zero_when_empty;
        this->workspace_mib = workspace_mib, this->fast_logits = fast_logits, this->max_counted = max_counted;
    }
};

static void check_ids(PARAMETERS)
{
    check_input(x, "input"), check_constants(target_ids, {}, denominator, row_weight);
    TORCH_CHECK_VALUE(!wants_gradient(target_weight), "lk: target_weight requires a gradient, and gets none; detach it, or build "
                      "the loss of logp, which has one");
    TORCH_CHECK_VALUE(!wants_gradient(tail_weight), "lk: tail_weight requires a gradient, and gets none; detach it, or build the "
                      "loss of tail, which has one");
}

// Gradients are made in backward: what of logp comes from above is known only then.
tuple<Tensor, Tensor, Tensor> linear_cross_entropy_ids(PARAMETERS, bool want_tail)
{
    LK_OP(linear_cross_entropy_ids_forward);
    check_ids(x, weight, target_ids, target_weight, tail_weight, bias, OPTIONS);
    want_tail = want_tail || has(tail_weight); // backward reads it
    const bool wanted = wants_gradient(x, weight, bias);
    const auto node = wanted ? make_node<LinearCrossEntropyIdsBackward>(x, weight, bias.value_or(Tensor())) : nullptr;
    Tensor loss, logp, tail, lse, lse_low;
    {
        const Below below;
        std::tie(loss, logp, tail, lse, lse_low) =
            linear_cross_entropy_ids_forward_op.call(x, weight, target_ids, target_weight, tail_weight, bias, OPTIONS,
                                                     wanted && x.requires_grad(), wanted && weight.requires_grad(),
                                                     wanted && has(bias) && bias->requires_grad(), want_tail);
    }
    if (!want_tail) tail.reset();
    if (!wanted) return {loss, logp, tail};
    for (const Tensor &out : {loss, logp}) torch::autograd::set_history(out, node);
    if (want_tail) torch::autograd::set_history(tail, node);
    node->keep(x, weight, target_ids, target_weight, tail_weight, bias, OPTIONS, tail, lse, lse_low);
    node_is_made(node);
    return {loss, logp, tail};
}

// The classes split over ranks: forward and backward have a collective each.
static tuple<Tensor, Tensor, Tensor> linear_cross_entropy_ids_parallel(PARAMETERS, LK_HEAD_RANKS_PARAMETERS, bool want_tail)
{
    LK_OP(linear_cross_entropy_ids_parallel_forward);
    check_ids(x, weight, target_ids, target_weight, tail_weight, bias, OPTIONS);
    want_tail = want_tail || has(tail_weight); // backward reads it
    const bool wanted = wants_gradient(x, weight, bias);
    const auto node = wanted ? make_node<LinearCrossEntropyIdsBackward>(x, weight, bias.value_or(Tensor())) : nullptr;
    Tensor loss, logp, tail, lse, lse_low, others;
    {
        const Below below;
        std::tie(loss, logp, tail, lse, lse_low, others) = linear_cross_entropy_ids_parallel_forward_op.call(
            x, weight, target_ids, target_weight, tail_weight, bias, OPTIONS, LK_HEAD_RANKS, wanted && x.requires_grad(),
            wanted && weight.requires_grad(), wanted && has(bias) && bias->requires_grad(), want_tail);
    }
    if (!want_tail) tail.reset();
    if (!wanted) return {loss, logp, tail};
    for (const Tensor &out : {loss, logp}) torch::autograd::set_history(out, node);
    if (want_tail) torch::autograd::set_history(tail, node);
    node->group = group, node->shards = shards.vec(), node->rank = rank, node->slices = slices;
    node->parts = parts, node->others = save(others);
    node->keep(x, weight, target_ids, target_weight, tail_weight, bias, OPTIONS, tail, lse, lse_low);
    node_is_made(node);
    return {loss, logp, tail};
}

// As F.linear: the matmuls' tensors in autocast's type.
template <class Op, class... More> static auto autocast(const Op &op, PARAMETERS, More... more)
{
    const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKeySet(c10::DispatchKey::LK_AUTOCAST));
    const at::ScalarType type = at::autocast::get_autocast_dtype(LK_DEVICE_TYPE);
    const auto cast = [&](const auto &t) { return at::autocast::cached_cast(type, t, LK_DEVICE_TYPE); };
    return op.call(cast(x), cast(weight), target_ids, target_weight, tail_weight, cast(bias), OPTIONS, more...);
}
static tuple<Tensor, Tensor, Tensor> linear_cross_entropy_ids_autocast(PARAMETERS, bool want_tail)
{
    LK_OP(linear_cross_entropy_ids);
    return autocast(linear_cross_entropy_ids_op, x, weight, target_ids, target_weight, tail_weight, bias, OPTIONS, want_tail);
}
static tuple<Tensor, Tensor, Tensor> linear_cross_entropy_ids_parallel_autocast(PARAMETERS, LK_HEAD_RANKS_PARAMETERS, bool want_tail)
{
    LK_OP(linear_cross_entropy_ids_parallel);
    return autocast(linear_cross_entropy_ids_parallel_op, x, weight, target_ids, target_weight, tail_weight, bias, OPTIONS,
                    LK_HEAD_RANKS, want_tail);
}

#define INPUTS                                                                                                                 \
    "Tensor x, Tensor weight, Tensor target_ids, Tensor? target_weight, Tensor? tail_weight, Tensor? bias, " LK_LOSS_SCHEMA     \
    ", int workspace_mib, bool fast_logits, int max_counted"
#define WANTS ", bool want_dx, bool want_dweight, bool want_dbias"
LK_OPS(m)
{
    user_op(m, "linear_cross_entropy_ids", "(" INPUTS ", bool want_tail) -> (Tensor, Tensor, Tensor)", &linear_cross_entropy_ids);
    kernel(m, "linear_cross_entropy_ids_forward", "(" INPUTS WANTS ", bool want_tail) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
           &linear_cross_entropy_ids_forward);
    kernel(m, "linear_cross_entropy_ids_backward",
           "(Tensor? dloss, Tensor? dlogp, Tensor? dtail, Tensor lse, Tensor lse_low, Tensor? tail, " INPUTS
           WANTS ") -> (Tensor, Tensor, Tensor)",
           &linear_cross_entropy_ids_backward);
    user_op(m, "linear_cross_entropy_ids_parallel", "(" INPUTS LK_HEAD_RANKS_SCHEMA ", bool want_tail) -> (Tensor, Tensor, Tensor)",
            &linear_cross_entropy_ids_parallel);
    kernel(m, "linear_cross_entropy_ids_parallel_forward",
           "(" INPUTS LK_HEAD_RANKS_SCHEMA WANTS ", bool want_tail) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
           &linear_cross_entropy_ids_parallel_forward);
    kernel(m, "linear_cross_entropy_ids_parallel_backward",
           "(Tensor? dloss, Tensor? dlogp, Tensor? dtail, Tensor lse, Tensor lse_low, Tensor? tail, Tensor others, " INPUTS
           LK_HEAD_RANKS_SCHEMA WANTS ") -> (Tensor, Tensor, Tensor)",
           &linear_cross_entropy_ids_parallel_backward);
    m.impl("linear_cross_entropy_ids_parallel",
           torch::dispatch(c10::DispatchKey::LK_AUTOCAST, &linear_cross_entropy_ids_parallel_autocast));
    m.impl("linear_cross_entropy_ids", torch::dispatch(c10::DispatchKey::LK_AUTOCAST, &linear_cross_entropy_ids_autocast));
}

} // namespace lk_torch

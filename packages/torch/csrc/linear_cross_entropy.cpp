// SPDX-License-Identifier: MIT
// linear_cross_entropy and linear_cross_entropy_stats, on one device or with the classes split over the ranks of a group:
// lk/linear_cross_entropy.cuh and lk/linear_cross_entropy_parallel.cuh; with class probabilities as targets, on one device:
// lk/linear_cross_entropy_probabilities.cuh.
#include "lk_torch.h"

#include <algorithm>
#include <numeric>

#include <ATen/autocast_mode.h>

#include "lk/linear_cross_entropy_parallel.cuh"
#include "lk/linear_cross_entropy_probabilities.cuh"
LK_DECLARE_ALL(LINEAR_CROSS_ENTROPY)
LK_DECLARE_ALL(LINEAR_CROSS_ENTROPY_PARALLEL)
LK_DECLARE_ALL(LINEAR_CROSS_ENTROPY_PROBABILITIES)

namespace lk_torch {

#define PARAMETERS                                                                                                             \
    const Tensor &x, const Tensor &weight, const Tensor &target, const Maybe &bias, const Maybe &class_weight,                 \
        LK_LOSS_PARAMETERS, int64_t workspace_mib, bool fast_logits, int64_t max_counted, bool batch_invariant
#define OPTIONS LK_LOSS_OPTIONS, workspace_mib, fast_logits, max_counted, batch_invariant
#define WANTS_PARAMETERS bool want_dx, bool want_dweight, bool want_dbias

// lk puts what it saves at a multiple of 256 bytes. In the tensor that is its first byte, so that a copy of it, as hooks of
// saved tensors make them, is as good. Where the tensor lies elsewhere, as some do on the CPU, lk gets memory beside it.
struct Kept {
    Tensor at;
    explicit Kept(const Tensor &saved) : at(saved)
    {
        const uintptr_t from = (uintptr_t)saved.const_data_ptr(), room = 256;
        if (from % room == 0) return;
        const Tensor wide = make({saved.numel() + (int64_t)room}, saved);
        at = wide.narrow(0, (int64_t)((room - (uintptr_t)wide.const_data_ptr() % room) % room), saved.numel());
    }
};

// What forward saves of a call with these sizes and options. Not LK_OK: lk cannot.
static lk_status saved_bytes_of(at::ScalarType type, const lk_linear_cross_entropy_parallel_args &split, size_t *bytes)
{
#define SAVED_BYTES(T)                                                                                                         \
    (split.parallel.vocab_total ? lk_linear_cross_entropy_parallel_saved_bytes_##T(&split, bytes)                              \
                                : lk_linear_cross_entropy_saved_bytes_##T(&split.common, bytes))
    return type == at::kBFloat16 ? SAVED_BYTES(bf16) : type == at::kHalf ? SAVED_BYTES(f16) : SAVED_BYTES(f32);
#undef SAVED_BYTES
}

// The arguments that all calls have, and what keeps their memory.
struct HeadCall {
    lk_linear_cross_entropy_parallel_args split = {}; // `parallel` where the classes are
    lk_linear_cross_entropy_args &a = split.common;
    Stream stream;
    HeadInput input;
    Rows rows, columns;
    Tensor t, b, w, d, r, dx, dweight, dbias;
    size_t budget, backward_least = 0;
    std::string group;
    lk_linear_cross_entropy_probabilities_args prob = {}; // where targets are probabilities of classes
    HeadCall(PARAMETERS, const std::string &group = {}, at::IntArrayRef shards = {}, int64_t rank = 0, int64_t slices = 1,
             int64_t parts = 1)
        : stream((check_input(x, "input"), x)), input(x, parts, group), rows(head_rows(input.all, "input")),
          columns(weight_beside(weight, x, "linear_weight", &a.dweight_dtype), "linear_weight"), group(group)
    {
        TORCH_CHECK_VALUE(weight.dim() == 2 && columns.cols == rows.cols, "lk: linear_weight has shape ", weight.sizes(),
                          "; it must be [classes, ", rows.cols, "]");
        TORCH_CHECK_VALUE(workspace_mib >= 0, "lk: workspace_mib is ", workspace_mib, "; it must be at least 1");
        if (!shards.empty()) fill_slice(split, columns.rows, "linear_weight", " rows", LK_SHARDS);
        if (probable(target)) fill_prob(input.all, target, ignore_index, fast_logits);
        else fill_target(a, input.all, target, &t);
        fill_loss(a, input.all, class_weight, shards.empty() ? columns.rows : split.parallel.vocab_total, &w, &d, &r,
                  LK_LOSS_OPTIONS);
        if (has(bias)) {
            TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == columns.rows, "lk: linear_bias has shape ", bias->sizes(),
                              "; it must be [", columns.rows, "]");
            b = bias->contiguous();
            a.bias = b.const_data_ptr(), a.bias_dtype = type_beside(b, x.scalar_type(), "linear_bias");
        }
        a.x = rows.data(), a.x_stride = rows.stride, a.tokens = rows.rows, a.hidden = rows.cols;
        a.weight = columns.data(), a.weight_stride = columns.stride, a.vocab = columns.rows;
        a.fast_logits = fast_logits, a.max_counted = max_counted, a.batch_invariant = batch_invariant;
        budget = (size_t)workspace_mib << 20;
        a.tf32 = x.scalar_type() == at::kFloat && at::globalContext().allowTF32CuBLAS();
    }
    bool ranks() const { return split.parallel.vocab_total != 0; }
    void fill_prob(const Tensor &x, const Tensor &target, int64_t ignore_index, bool fast_logits)
    {
        TORCH_CHECK_VALUE(!ranks(), "lk: with group or vocab_slices, target must be numbers of classes, not probabilities of them");
        const at::IntArrayRef tokens = x.sizes().slice(0, x.dim() - 1);
        TORCH_CHECK_VALUE(target.dim() == x.dim() && target_sizes(target) == tokens && target.size(-1) == columns.rows,
                          "lk: target has shape ", target.sizes(), "; probabilities of classes need ", tokens, " and ", columns.rows);
        TORCH_CHECK_VALUE(ignore_index < 0, "lk: ignore_index is ", ignore_index, "; it does not apply to probabilities of classes");
        type_beside(target, x.scalar_type(), "target, as probabilities of classes,");
        const Rows of(fast_logits ? target : target.to(at::kFloat), "target"); // f32 logits have probabilities in f32
        t = of.t, prob.target_prob = of.data(), prob.target_prob_stride = of.stride;
        prob.target_prob_dtype = t.scalar_type() == at::kFloat ? LK_DTYPE_F32 : LK_DTYPE_T;
    }
    bool has_probabilities() const { return probable(t); }
    // The call with class probabilities, of what `a` has by now.
    const lk_linear_cross_entropy_probabilities_args *with_probabilities()
    {
        prob.common = a;
        return &prob;
    }
    void take_columns(int64_t first, int64_t count)
    {
        a.weight = element(columns.t, columns.data(), first * columns.distance()), a.vocab = count;
        if (b.defined()) a.bias = element(b, b.const_data_ptr(), first);
    }
    // Exponentials, which are kept in bf16 alone, are made of rows at multiples of 16 bytes. Others are copied.
    void align()
    {
        if (rows.t.scalar_type() != at::kBFloat16) return;
        for (Rows *r : {&rows, &columns})
            if ((uintptr_t)r->data() % 16 || r->stride % 8) r->pack();
        a.x = rows.data(), a.x_stride = rows.stride, a.weight = columns.data(), a.weight_stride = columns.stride;
    }
    // Whether lk saves in so many bytes. Sizes, options and the device settle it, so backward finds what forward found.
    bool saves(int64_t bytes)
    {
        size_t needed = 0;
        align();
        return saved_bytes_of(rows.t.scalar_type(), split, &needed) == LK_OK && needed <= (size_t)bytes;
    }
    void keep_lse(at::IntArrayRef tokens, const Tensor &x, Tensor *lse, Tensor *lse_low)
    {
        *lse = make(tokens, x, at::kFloat), *lse_low = make(tokens, x, at::kFloat);
        a.lse = lse->mutable_data_ptr<float>(), a.lse_low = lse_low->mutable_data_ptr<float>();
    }
    void want(const Tensor &weight, bool want_dx, bool want_dweight, bool want_dbias)
    {
        if (want_dx) dx = make(a.tokens ? input.all.sizes() : input.mine.sizes(), input.all), a.dx = dx.mutable_data_ptr();
        if (want_dweight) dweight = make(weight.sizes(), weight), a.dweight = dweight.mutable_data_ptr();
        if (want_dbias) dbias = make({a.vocab}, b), a.dbias = dbias.mutable_data_ptr(), a.dbias_dtype = a.bias_dtype;
    }
    // Of forward: what backward will need for these gradients, also where the upstream gradients of all outputs come.
    void expect_backward(const Tensor &x, bool want_dx, bool want_dweight, bool want_dbias, bool stats)
    {
        if (!budget || !(want_dx || want_dweight || want_dbias)) return;
        lk_linear_cross_entropy_parallel_args whole = split;
        lk_linear_cross_entropy_args &back = whole.common;
        lk_linear_cross_entropy_plan plan = {};
        back.dx = want_dx ? &back : nullptr, back.dweight = want_dweight ? &back : nullptr;
        if (want_dbias) back.dbias = &back, back.dbias_dtype = back.bias_dtype;
        if (stats) back.dlse = back.dentropy = (const float *)&back;
        if (has_probabilities()) {
            lk_linear_cross_entropy_probabilities_args of = prob;
            of.common = back;
            LK_RUN(lk_linear_cross_entropy_probabilities_backward_plan, x, &of, SIZE_MAX, &plan);
        } else if (ranks()) LK_RUN(lk_linear_cross_entropy_parallel_backward_plan, x, &whole, SIZE_MAX, &plan);
        else LK_RUN(lk_linear_cross_entropy_backward_plan, x, &back, SIZE_MAX, &plan);
        backward_least = plan.minimum_bytes;
    }
};
// A budget of 0 is lk's own. What is saved settles the path. So a budget below the smallest workspace, which is for logits, does
// not rule the call out.
#define RUN(function, args, call, x)                                                                                           \
    do {                                                                                                                       \
        lk_linear_cross_entropy_plan plan = {};                                                                                \
        size_t most = call.budget;                                                                                             \
        if (most) {                                                                                                            \
            LK_RUN(function##_plan, x, args, SIZE_MAX, &plan);                                                                 \
            if (call.a.saved) most = std::max(most, plan.minimum_bytes);                                                       \
            else check_budget(most, std::max(plan.minimum_bytes, call.backward_least));                                        \
        }                                                                                                                      \
        if (most) LK_RUN(function##_plan, x, args, most, &plan);                                                               \
        else LK_RUN(function##_workspace_bytes, x, args, &plan.workspace_bytes);                                               \
        const Workspace workspace(call.a.workspace_bytes = plan.workspace_bytes);                                              \
        call.a.workspace = workspace.start;                                                                                    \
        call.input.gather();                                                                                                   \
        const Locked<lk_linear_cross_entropy_context> locked(x, lk_linear_cross_entropy_init);                                 \
        call.a.context = locked.context;                                                                                       \
        LK_RUN(function, x, args, call.stream);                                                                                \
    } while (0)

// The same on one device, for the call's kind of targets.
#define RUN_HERE(direction, call, x)                                                                                           \
    do {                                                                                                                       \
        if (call.has_probabilities())                                                                                          \
            RUN(lk_linear_cross_entropy_probabilities_##direction, call.with_probabilities(), call, x);                        \
        else RUN(lk_linear_cross_entropy_##direction, &call.a, call, x);                                                       \
    } while (0)

// forward; returns what backward would compute again in so many bytes, if that is wanted. Where they turn out not to do, which
// only a program for any number of tokens can see (saved_bytes), nothing is in them.
static Tensor run_forward(HeadCall &c, const Tensor &x, int64_t saved_bytes)
{
    const auto run = [&] {
        if (c.ranks()) RUN(lk_linear_cross_entropy_parallel_forward, &c.split, c, x);
        else RUN_HERE(forward, c, x);
    };
    if (!saved_bytes) return run(), Tensor();
    const Tensor saved = make({saved_bytes}, x, at::kByte);
    if (!c.saves(saved_bytes)) return run(), saved;
    const Kept kept(saved);
    c.a.saved = kept.at.mutable_data_ptr();
    run();
    if (!kept.at.is_same(saved)) saved.copy_(kept.at);
    return saved;
}

// loss; lse and lse_low, if backward wants a gradient; if saved_bytes what forward saves in as many bytes
static tuple<Tensor, Tensor, Tensor, Tensor> linear_cross_entropy_forward(PARAMETERS, WANTS_PARAMETERS, int64_t saved_bytes)
{
    HeadCall c(x, weight, target, bias, class_weight, OPTIONS);
    Tensor loss = make(reduction ? at::IntArrayRef() : target_sizes(target), x, at::kFloat), lse, lse_low;
    c.a.loss = loss.mutable_data_ptr<float>();
    c.expect_backward(x, want_dx, want_dweight, want_dbias, false);
    if (want_dx || want_dweight || want_dbias) c.keep_lse(target_sizes(target), x, &lse, &lse_low);
    return {loss, lse, lse_low, run_forward(c, x, saved_bytes)};
}

// loss, lse, entropy, argmax, statistics, lse_low
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> linear_cross_entropy_stats_forward(PARAMETERS, WANTS_PARAMETERS,
                                                                                                bool statistics)
{
    HeadCall c(x, weight, target, bias, class_weight, OPTIONS);
    c.expect_backward(x, want_dx, want_dweight, want_dbias, true);
    Tensor loss = make(reduction ? at::IntArrayRef() : target_sizes(target), x, at::kFloat);
    Tensor lse, lse_low;
    Statistics of_tokens;
    of_tokens.want(c.a, statistics, target_sizes(target), x), c.keep_lse(target_sizes(target), x, &lse, &lse_low);
    c.a.loss = loss.mutable_data_ptr<float>();
    RUN_HERE(forward, c, x);
    of_tokens.split();
    return {loss, lse, of_tokens.entropy, of_tokens.argmax, of_tokens.statistics, lse_low};
}

// loss, and the wanted gradients for one upstream gradient, without one for 1
static tuple<Tensor, Tensor, Tensor, Tensor> linear_cross_entropy_forward_backward(PARAMETERS, const Maybe &upstream,
                                                                                   bool want_dx, bool want_dweight,
                                                                                   bool want_dbias)
{
    HeadCall c(x, weight, target, bias, class_weight, OPTIONS);
    TORCH_CHECK_VALUE(reduction, "lk: a loss for each token needs its upstream gradients; call forward and backward");
    Tensor loss = make({}, x, at::kFloat);
    c.a.loss = loss.mutable_data_ptr<float>();
    if (has(upstream)) c.a.upstream = upstream->const_data_ptr<float>();
    c.want(weight, want_dx, want_dweight, want_dbias);
    RUN_HERE(forward_backward, c, x);
    return {loss, c.dx, c.dweight, c.dbias};
}

static tuple<Tensor, Tensor, Tensor> run_backward(HeadCall &c, const Maybe &dloss, const Maybe &dlse, const Maybe &dentropy,
                                                  const Tensor &lse, const Tensor &lse_low, const Maybe &entropy,
                                                  const Maybe &saved, const Tensor &x, const Tensor &weight, bool want_dx,
                                                  bool want_dweight, bool want_dbias)
{
    // No gradient of the loss is 0, but lk's NULL is 1.
    const Tensor up = has(dloss) ? dloss->contiguous() : at::zeros({}, x.options().dtype(at::kFloat));
    const Tensor l = lse.contiguous(), low = lse_low.contiguous();
    const Maybe dl = packed(dlse), de = packed(dentropy), h = packed(entropy);
    c.a.upstream = up.const_data_ptr<float>(), c.a.upstream_per_token = has(dloss) && !c.a.reduction;
    c.a.lse = (float *)l.const_data_ptr(), c.a.lse_low = (float *)low.const_data_ptr();
    if (has(dl)) c.a.dlse = dl->const_data_ptr<float>();
    if (has(de)) c.a.dentropy = de->const_data_ptr<float>(), c.a.entropy = (float *)h->const_data_ptr();
    c.want(weight, want_dx, want_dweight, want_dbias);
    if (!want_dx && !want_dweight && !want_dbias) return {};
    if (!want_dx && !c.a.vocab) { // empty tensors, whose NULL lk would not take for an output
        c.input.gather();
        return {c.dx, c.dweight, c.dbias};
    }
    std::optional<Kept> kept;
    if (has(saved) && c.saves(saved->numel())) {
        kept.emplace(*saved);
        if (!kept->at.is_same(*saved)) kept->at.copy_(*saved);
        c.a.saved = kept->at.mutable_data_ptr();
    }
    if (c.ranks()) RUN(lk_linear_cross_entropy_parallel_backward, &c.split, c, x);
    else RUN_HERE(backward, c, x);
    return {c.dx, c.dweight, c.dbias};
}
static tuple<Tensor, Tensor, Tensor> linear_cross_entropy_backward(const Maybe &dloss, const Maybe &dlse, const Maybe &dentropy,
                                                                   const Tensor &lse, const Tensor &lse_low, const Maybe &entropy,
                                                                   const Maybe &saved, PARAMETERS, bool want_dx,
                                                                   bool want_dweight, bool want_dbias)
{
    HeadCall c(x, weight, target, bias, class_weight, OPTIONS);
    return run_backward(c, dloss, dlse, dentropy, lse, lse_low, entropy, saved, x, weight, want_dx, want_dweight, want_dbias);
}

// loss, lse, lse_low, others, and with stats entropy, argmax and statistics, which are the same bits on every rank; if
// saved_bytes what this rank saves in as many bytes. One all-gather, of 16, 32 or 40 bytes a token.
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
linear_cross_entropy_parallel_forward(PARAMETERS, LK_HEAD_RANKS_PARAMETERS, WANTS_PARAMETERS, bool stats, bool statistics,
                                      int64_t saved_bytes)
{
    HeadCall c(x, weight, target, bias, class_weight, OPTIONS, LK_HEAD_RANKS);
    c.expect_backward(x, want_dx, want_dweight, want_dbias, stats);
    Tensor loss = make(reduction ? at::IntArrayRef() : target.sizes(), x, at::kFloat);
    Statistics of_tokens;
    Tensor lse, lse_low, others = make(target.sizes(), x, at::kFloat);
    c.a.loss = loss.mutable_data_ptr<float>(), c.keep_lse(target.sizes(), x, &lse, &lse_low);
    if (stats) of_tokens.want(c.a, statistics, target.sizes(), x);
    const Tensor states = make({slices * c.a.tokens, c.a.statistics ? 10 : stats || label_smoothing > 0 ? 8 : 4}, x, at::kFloat);
    Tensor saved;
    run_slices(c.split, LK_SHARDS, states, [&](int64_t first, int64_t count) { c.take_columns(first, count); },
               [&] { saved = run_forward(c, x, saved_bytes); });
    const Tensor all = gather_states(states, LK_RANKS);
    c.split.all_states = all.const_data_ptr(), c.split.states = others.mutable_data_ptr();
    LK_RUN(lk_linear_cross_entropy_parallel_finish_workspace_bytes, x, &c.split, &c.a.workspace_bytes);
    const Workspace workspace(c.a.workspace_bytes);
    c.a.workspace = workspace.start;
    LK_RUN(lk_linear_cross_entropy_parallel_finish, x, &c.split, c.stream);
    of_tokens.split();
    return {loss, lse, lse_low, others, of_tokens.entropy, of_tokens.argmax, of_tokens.statistics, saved};
}

static tuple<Tensor, Tensor, Tensor>
linear_cross_entropy_parallel_backward(const Maybe &dloss, const Maybe &dlse, const Maybe &dentropy, const Tensor &lse,
                                       const Tensor &lse_low, const Tensor &others, const Maybe &entropy, const Maybe &saved,
                                       PARAMETERS, LK_HEAD_RANKS_PARAMETERS, bool want_dx, bool want_dweight, bool want_dbias)
{
    HeadCall c(x, weight, target, bias, class_weight, OPTIONS, LK_HEAD_RANKS);
    const Tensor o = others.contiguous();
    c.split.states = (void *)o.const_data_ptr(), c.split.parallel.user = &c;
    c.split.parallel.reduce = parts == 1 ? sum_dx<HeadCall> : scatter_dx<HeadCall>;
    const auto gradients =
        run_backward(c, dloss, dlse, dentropy, lse, lse_low, entropy, saved, x, weight, want_dx, want_dweight, want_dbias);
    if (want_dx) wait(c.dx);
    return gradients;
}

// Outputs with a gradient: loss, and lse and entropy of linear_cross_entropy_stats.
struct LinearCrossEntropyBackward : Node {
    SavedVariable x, weight, target, bias, class_weight, lse, lse_low, others, entropy, saved, divisor, factors;
    std::string group;
    std::vector<int64_t> shards; // empty: the classes are not split
    int64_t rank = 0, slices = 1, parts = 1;
    bool stats;
    int64_t reduction, ignore_index, workspace_mib, max_counted;
    double label_smoothing, z_loss, softcap, logit_scale;
    bool zero_when_empty, fast_logits, batch_invariant;
    variable_list apply(variable_list &&up) override
    {
        LK_OP(linear_cross_entropy_backward);
        LK_OP(linear_cross_entropy_parallel_backward);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!up[0].defined() && !(stats && (up[1].defined() || up[2].defined()))) return variable_list(3);
        const Tensor l = stats ? lse.unpack(held(this)) : lse.unpack(), low = lse_low.unpack();
        const Tensor h = stats ? entropy.unpack(held(this)) : Tensor();
        const Maybe dlse = stats ? maybe(up[1]) : Maybe(), dentropy = stats ? maybe(up[2]) : Maybe();
        const Tensor in = x.unpack(), w = weight.unpack(), t = target.unpack(), b = bias.unpack();
        const Tensor cw = class_weight.unpack(), s = saved.unpack(), o = others.unpack();
        const Maybe denominator = maybe(divisor.unpack()), row_weight = maybe(factors.unpack());
        const Below below;
        const bool wants[] = {task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
        auto [dx, dweight, dbias] =
            shards.empty() ? linear_cross_entropy_backward_op.call(maybe(up[0]), dlse, dentropy, l, low, maybe(h), maybe(s), in, w,
                                                                  t, maybe(b), maybe(cw), OPTIONS, wants[0], wants[1], wants[2])
                          : linear_cross_entropy_parallel_backward_op.call(
                                maybe(up[0]), dlse, dentropy, l, low, o, maybe(h), maybe(s), in, w, t, maybe(b), maybe(cw), OPTIONS,
                                LK_HEAD_RANKS, wants[0], wants[1], wants[2]);
        return once(*this, up, {dx, dweight, dbias}, "linear_cross_entropy");
    }
    void release_variables() override
    {
        x.reset_data(), weight.reset_data(), target.reset_data(), bias.reset_data();
        class_weight.reset_data(), lse.reset_data(), lse_low.reset_data(), others.reset_data(), entropy.reset_data();
        saved.reset_data(), divisor.reset_data(), factors.reset_data();
    }
    void keep(PARAMETERS)
    {
        this->x = save(x), this->weight = save(weight), this->target = save(target), this->bias = save(bias);
        this->class_weight = save(class_weight);
        this->reduction = reduction, this->ignore_index = ignore_index, this->label_smoothing = label_smoothing;
        this->z_loss = z_loss, this->softcap = softcap, this->logit_scale = logit_scale;
        this->zero_when_empty = zero_when_empty, this->workspace_mib = workspace_mib, this->fast_logits = fast_logits;
        this->max_counted = max_counted, this->batch_invariant = batch_invariant, divisor = save(denominator);
        factors = save(row_weight);
    }
};

// The bytes of the buffer in which forward saves what backward would compute again; 0 where lk cannot. They depend on types,
// sizes, options and the device alone, which are known while torch.compile traces; but the number of tokens may be symbolic. Then
// there is a buffer of lk's for 64 rows, for each 64 rows, and 1 KiB besides: exponentials need more numbers a row than logits of
// their type. lk may choose the other of the two for more rows than 64; forward keeps nothing where that does not fit.
// classes: of all ranks; 0: they are not split.
static c10::SymInt saved_bytes(bool keep, const Tensor &x, const Tensor &weight, const Tensor &target, const Maybe &bias,
                               double softcap, double label_smoothing, bool fast_logits, int64_t max_counted, int64_t classes)
{
    if (!keep || probable(target) || weight.dim() != 2 || x.device().type() != LK_DEVICE_TYPE) return 0;
    const Stream on_device(x);
    lk_linear_cross_entropy_parallel_args split = {};
    lk_linear_cross_entropy_args &a = split.common;
    size_t bytes = 0;
    const c10::SymInt tokens = target.sym_numel();
    const std::optional<int64_t> number = tokens.maybe_as_int();
    a.tokens = number.value_or(64), a.max_counted = number ? max_counted : 0;
    a.vocab = weight.sym_size(0).guard_int(__FILE__, __LINE__), a.hidden = weight.sym_size(1).guard_int(__FILE__, __LINE__);
    a.fast_logits = fast_logits, a.label_smoothing = (float)label_smoothing, a.softcap = (float)softcap;
    a.bias = has(bias) ? &a : nullptr; // there is one
    split.parallel.vocab_total = classes, split.parallel.ranks = 1;
    if (saved_bytes_of(x.scalar_type(), split, &bytes) != LK_OK) return 0;
    if (number) return (int64_t)bytes;
    const c10::SymInt rows = max_counted > 0 && tokens > max_counted ? max_counted : tokens;
    return (rows + 63) / 64 * (int64_t)(bytes + 1024);
}

// A reduced loss computes its gradients in forward, which saves the fourth matmul: backward does not compute the logits again.
// Not in f16, unless the caller knows the upstream gradient: one for 1 is too small there, and what rounding takes off, a loss
// scale does not bring back. And not with batch_invariant, which forward alone promises.
Tensor linear_cross_entropy(PARAMETERS, bool keep, const Maybe &grad_scale)
{
    LK_OP_AS(linear_cross_entropy_forward, tuple<Tensor, Tensor, Tensor, Tensor>(PARAMETERS, bool, bool, bool, c10::SymInt));
    LK_OP(linear_cross_entropy_forward_backward);
    check_input(x, "input"), check_constants(target, class_weight, denominator, row_weight);
    if (!wants_gradient(x, weight, bias)) {
        const Below below;
        return std::get<0>(
            linear_cross_entropy_forward_op.call(x, weight, target, bias, class_weight, OPTIONS, false, false, false, 0));
    }
    if (reduction != LK_REDUCTION_NONE && (x.scalar_type() != at::kHalf || has(grad_scale)) && !batch_invariant) {
        const Expected expected = expected_upstream(x, grad_scale, Reduced::LINEAR_CROSS_ENTROPY);
        const auto node = make_node<LossBackward>(x, weight, bias.value_or(Tensor()));
        Tensor loss, dx, dweight, dbias;
        {
            const Below below;
            std::tie(loss, dx, dweight, dbias) = linear_cross_entropy_forward_backward_op.call(
                x, weight, target, bias, class_weight, OPTIONS, maybe(expected.upstream), x.requires_grad(), weight.requires_grad(),
                has(bias) && bias->requires_grad());
        }
        torch::autograd::set_history(loss, node);
        node->keep({dx, dweight, dbias}, expected);
        node_is_made(node);
        return loss;
    }
    const auto node = make_node<LinearCrossEntropyBackward>(x, weight, bias.value_or(Tensor()));
    const c10::SymInt bytes = saved_bytes(keep && !batch_invariant, x, weight, target, bias, softcap, label_smoothing, fast_logits,
                                        max_counted, 0);
    Tensor loss, lse, lse_low, saved;
    {
        const Below below;
        std::tie(loss, lse, lse_low, saved) =
            linear_cross_entropy_forward_op.call(x, weight, target, bias, class_weight, OPTIONS, x.requires_grad(),
                                                 weight.requires_grad(), has(bias) && bias->requires_grad(), bytes);
    }
    torch::autograd::set_history(loss, node);
    node->stats = false, node->lse = save(lse), node->lse_low = save(lse_low), node->saved = save(bytes != 0 ? saved : Tensor());
    node->keep(x, weight, target, bias, class_weight, OPTIONS);
    node_is_made(node);
    return loss;
}

tuple<Tensor, Tensor, Tensor, Tensor, Tensor> linear_cross_entropy_stats(PARAMETERS, bool statistics)
{
    LK_OP(linear_cross_entropy_stats_forward);
    check_input(x, "input"), check_constants(target, class_weight, denominator, row_weight);
    const bool wanted = wants_gradient(x, weight, bias);
    const auto node = wanted ? make_node<LinearCrossEntropyBackward>(x, weight, bias.value_or(Tensor())) : nullptr;
    Tensor loss, lse, entropy, argmax, more, lse_low;
    {
        const Below below;
        std::tie(loss, lse, entropy, argmax, more, lse_low) =
            linear_cross_entropy_stats_forward_op.call(x, weight, target, bias, class_weight, OPTIONS, wanted && x.requires_grad(),
                                                       wanted && weight.requires_grad(),
                                                       wanted && has(bias) && bias->requires_grad(), statistics);
    }
    if (wanted) {
        for (const Tensor &out : {loss, lse, entropy}) torch::autograd::set_history(out, node);
        node->stats = true, node->lse = SavedVariable(lse, true), node->entropy = SavedVariable(entropy, true);
        node->lse_low = save(lse_low);
        node->keep(x, weight, target, bias, class_weight, OPTIONS);
        node_is_made(node);
    }
    return {loss, lse, entropy, argmax, statistics ? more : Tensor()};
}

// The classes split over ranks. Gradients are made in backward, also those of a reduced loss: dx is then summed over the ranks
// beside the work on dweight. The collectives of all ranks come in one order, since forward and backward have one each, and one
// of x before it where that is in parts.
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor> parallel(PARAMETERS, LK_HEAD_RANKS_PARAMETERS, bool stats, bool statistics,
                                                              bool keep)
{
    LK_OP_AS(linear_cross_entropy_parallel_forward,
             tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(PARAMETERS, LK_HEAD_RANKS_PARAMETERS, bool, bool,
                                                                                   bool, bool, bool, c10::SymInt));
    check_input(x, "input"), check_constants(target, class_weight, denominator, row_weight);
    const bool wanted = wants_gradient(x, weight, bias);
    const auto node = wanted ? make_node<LinearCrossEntropyBackward>(x, weight, bias.value_or(Tensor())) : nullptr;
    const int64_t classes = std::accumulate(shards.begin(), shards.end(), (int64_t)0);
    const c10::SymInt bytes = saved_bytes(wanted && keep && !batch_invariant && slices == 1, x, weight, target, bias, softcap, label_smoothing,
                                          fast_logits, max_counted, classes);
    Tensor loss, lse, lse_low, others, entropy, argmax, more, saved;
    {
        const Below below;
        std::tie(loss, lse, lse_low, others, entropy, argmax, more, saved) = linear_cross_entropy_parallel_forward_op.call(
            x, weight, target, bias, class_weight, OPTIONS, LK_HEAD_RANKS, wanted && x.requires_grad(),
            wanted && weight.requires_grad(), wanted && has(bias) && bias->requires_grad(), stats, statistics, bytes);
    }
    if (!statistics) more.reset();
    if (!stats) entropy.reset(), argmax.reset();
    if (!wanted) return {loss, lse, entropy, argmax, more};
    torch::autograd::set_history(loss, node);
    if (stats) torch::autograd::set_history(lse, node), torch::autograd::set_history(entropy, node);
    node->stats = stats, node->lse = SavedVariable(lse, stats), node->entropy = SavedVariable(entropy, stats);
    node->lse_low = save(lse_low), node->others = save(others), node->saved = save(bytes != 0 ? saved : Tensor());
    node->group = group, node->shards = shards.vec(), node->rank = rank, node->slices = slices;
    node->parts = parts;
    node->keep(x, weight, target, bias, class_weight, OPTIONS);
    node_is_made(node);
    return {loss, lse, entropy, argmax, more};
}
static Tensor linear_cross_entropy_parallel(PARAMETERS, LK_HEAD_RANKS_PARAMETERS, bool keep)
{
    return std::get<0>(parallel(x, weight, target, bias, class_weight, OPTIONS, LK_HEAD_RANKS, false, false, keep));
}
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor> linear_cross_entropy_stats_parallel(PARAMETERS, LK_HEAD_RANKS_PARAMETERS,
                                                                                         bool statistics)
{
    return parallel(x, weight, target, bias, class_weight, OPTIONS, LK_HEAD_RANKS, true, statistics, false);
}

// As F.linear: the matmul's tensors in autocast's type. The other ops compute in float whatever the type, and take it as it is.
template <class Op, class... More> static auto autocast(const Op &op, PARAMETERS, More... more)
{
    const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKeySet(c10::DispatchKey::LK_AUTOCAST));
    const at::ScalarType type = at::autocast::get_autocast_dtype(LK_DEVICE_TYPE);
    const auto cast = [&](const auto &t) { return at::autocast::cached_cast(type, t, LK_DEVICE_TYPE); };
    return op.call(cast(x), cast(weight), target, cast(bias), class_weight, OPTIONS, more...);
}
static Tensor linear_cross_entropy_autocast(PARAMETERS, bool keep, const Maybe &grad_scale)
{
    LK_OP(linear_cross_entropy);
    return autocast(linear_cross_entropy_op, x, weight, target, bias, class_weight, OPTIONS, keep, grad_scale);
}
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor> linear_cross_entropy_stats_autocast(PARAMETERS, bool statistics)
{
    LK_OP(linear_cross_entropy_stats);
    return autocast(linear_cross_entropy_stats_op, x, weight, target, bias, class_weight, OPTIONS, statistics);
}
static Tensor linear_cross_entropy_parallel_autocast(PARAMETERS, LK_HEAD_RANKS_PARAMETERS, bool keep)
{
    LK_OP(linear_cross_entropy_parallel);
    return autocast(linear_cross_entropy_parallel_op, x, weight, target, bias, class_weight, OPTIONS, LK_HEAD_RANKS, keep);
}
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
linear_cross_entropy_stats_parallel_autocast(PARAMETERS, LK_HEAD_RANKS_PARAMETERS, bool statistics)
{
    LK_OP(linear_cross_entropy_stats_parallel);
    return autocast(linear_cross_entropy_stats_parallel_op, x, weight, target, bias, class_weight, OPTIONS, LK_HEAD_RANKS,
                    statistics);
}

#define INPUTS "Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, "
#define SETTINGS LK_LOSS_SCHEMA ", int workspace_mib, bool fast_logits, int max_counted, bool batch_invariant"
#define WANTS ", bool want_dx, bool want_dweight, bool want_dbias"
LK_OPS(m)
{
    user_op(m, "linear_cross_entropy", "(" INPUTS SETTINGS ", bool keep, Tensor? grad_scale) -> Tensor", &linear_cross_entropy);
    user_op(m, "linear_cross_entropy_stats",
            "(" INPUTS SETTINGS ", bool statistics) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", &linear_cross_entropy_stats);
    kernel(m, "linear_cross_entropy_stats_forward",
           "(" INPUTS SETTINGS WANTS ", bool statistics) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
           &linear_cross_entropy_stats_forward);
    kernel(m, "linear_cross_entropy_forward",
           "(" INPUTS SETTINGS WANTS ", SymInt saved_bytes) -> (Tensor, Tensor, Tensor, Tensor)", &linear_cross_entropy_forward);
    kernel(m, "linear_cross_entropy_forward_backward",
           "(" INPUTS SETTINGS ", Tensor? upstream" WANTS ") -> (Tensor, Tensor, Tensor, Tensor)", &linear_cross_entropy_forward_backward);
    kernel(m, "linear_cross_entropy_backward",
           "(Tensor? dloss, Tensor? dlse, Tensor? dentropy, Tensor lse, Tensor lse_low, Tensor? entropy, Tensor? saved, " INPUTS
           SETTINGS WANTS ") -> (Tensor, Tensor, Tensor)", &linear_cross_entropy_backward);
    user_op(m, "linear_cross_entropy_parallel", "(" INPUTS SETTINGS LK_HEAD_RANKS_SCHEMA ", bool keep) -> Tensor",
            &linear_cross_entropy_parallel);
    user_op(m, "linear_cross_entropy_stats_parallel",
            "(" INPUTS SETTINGS LK_HEAD_RANKS_SCHEMA ", bool statistics) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
            &linear_cross_entropy_stats_parallel);
    kernel(m, "linear_cross_entropy_parallel_forward",
           "(" INPUTS SETTINGS LK_HEAD_RANKS_SCHEMA WANTS ", bool stats, bool statistics, SymInt saved_bytes) -> "
           "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
           &linear_cross_entropy_parallel_forward);
    kernel(m, "linear_cross_entropy_parallel_backward",
           "(Tensor? dloss, Tensor? dlse, Tensor? dentropy, Tensor lse, Tensor lse_low, Tensor others, Tensor? entropy, "
           "Tensor? saved, " INPUTS SETTINGS LK_HEAD_RANKS_SCHEMA WANTS ") -> (Tensor, Tensor, Tensor)",
           &linear_cross_entropy_parallel_backward);
    m.impl("linear_cross_entropy", torch::dispatch(c10::DispatchKey::LK_AUTOCAST, &linear_cross_entropy_autocast));
    m.impl("linear_cross_entropy_stats", torch::dispatch(c10::DispatchKey::LK_AUTOCAST, &linear_cross_entropy_stats_autocast));
    m.impl("linear_cross_entropy_parallel",
           torch::dispatch(c10::DispatchKey::LK_AUTOCAST, &linear_cross_entropy_parallel_autocast));
    m.impl("linear_cross_entropy_stats_parallel",
           torch::dispatch(c10::DispatchKey::LK_AUTOCAST, &linear_cross_entropy_stats_parallel_autocast));
}

} // namespace lk_torch

// SPDX-License-Identifier: MIT
// linear_kl, on one device or with the classes split over the ranks of a group: lk/linear_kl.cuh and lk/linear_kl_parallel.cuh.
#include "lk_torch.h"

#include <algorithm>

#include <ATen/autocast_mode.h>

#include "lk/linear_kl_parallel.cuh"
LK_DECLARE_ALL(LINEAR_KL)
LK_DECLARE_ALL(LINEAR_KL_PARALLEL)

namespace lk_torch {

#define PARAMETERS                                                                                                             \
    const Tensor &x, const Tensor &weight, const Tensor &teacher_input, const Tensor &teacher_weight, const Maybe &bias,       \
        const Maybe &teacher_bias, const Maybe &row_weight, int64_t reduction, int64_t divergence, double beta,                \
        double logit_scale, double teacher_scale, double softcap, double teacher_softcap, int64_t workspace_mib,               \
        bool fast_logits, int64_t max_counted
#define OPTIONS                                                                                                                \
    reduction, divergence, beta, logit_scale, teacher_scale, softcap, teacher_softcap, workspace_mib, fast_logits, max_counted
#define ARGUMENTS x, weight, teacher_input, teacher_weight, bias, teacher_bias, row_weight, OPTIONS

// The hidden states, the weight and the bias of one of the two heads, beside input. b keeps the memory of a copy.
struct Head {
    Rows rows, columns;
    int dweight_dtype;
    Tensor b;
    Head(const Tensor &input, const Tensor &x, const Tensor &weight, const Maybe &bias, const char *x_name,
         const char *weight_name, const char *bias_name)
        : rows(head_rows(x, x_name)), columns(weight_beside(weight, input, weight_name, &dweight_dtype), weight_name)
    {
        TORCH_CHECK_VALUE(weight.dim() == 2 && columns.cols == rows.cols, "lk: ", weight_name, " has shape ", weight.sizes(),
                          "; it must be [classes, ", rows.cols, "]");
        check_type(input, x, x_name);
        if (!has(bias)) return;
        TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == columns.rows, "lk: ", bias_name, " has shape ", bias->sizes(),
                          "; it must be [", columns.rows, "]");
        check_type(input, *bias, bias_name);
        b = bias->contiguous();
    }
    static void check_type(const Tensor &input, const Tensor &t, const char *name)
    {
        TORCH_CHECK_TYPE(t.scalar_type() == input.scalar_type(), "lk: ", name, " is ", dtype_name(t.scalar_type()),
                         ", but input is ", dtype_name(input.scalar_type()));
    }
    const void *bias() const { return b.defined() ? b.const_data_ptr() : nullptr; }
};

// The arguments that all calls have, and what keeps their memory.
struct HeadsCall {
    lk_linear_kl_parallel_args split = {}; // `parallel` where the classes are
    lk_linear_kl_args &a = split.common;
    Stream stream;
    HeadInput input, teacher_input;
    Head student, teacher;
    Tensor w, up, dx, dweight, dbias, entropy;
    Maybe denominator; // what a loss of one number is divided by; undefined: 1
    size_t budget, backward_least = 0;
    std::string group;
    HeadsCall(PARAMETERS, const std::string &group = {}, at::IntArrayRef shards = {}, int64_t rank = 0, int64_t slices = 1,
              int64_t parts = 1)
        : stream((check_input(x, "input"), x)), input(x, parts, group), teacher_input(teacher_input, parts, group, "teacher_input"),
          student(x, input.all, weight, bias, "input", "linear_weight", "linear_bias"),
          teacher(x, this->teacher_input.all, teacher_weight, teacher_bias, "teacher_input", "teacher_weight", "teacher_bias"),
          group(group)
    {
        if (!shards.empty()) fill_slice(split, student.columns.rows, "linear_weight", " rows", LK_SHARDS);
        const at::IntArrayRef rows = x.sizes().slice(0, x.dim() - 1);
        TORCH_CHECK_VALUE(teacher_input.dim() == x.dim() && teacher_input.sizes().slice(0, x.dim() - 1) == rows,
                          "lk: teacher_input has shape ", teacher_input.sizes(), "; an input of ", x.sizes(), " needs ", rows,
                          " and the teacher's hidden size");
        TORCH_CHECK_VALUE(teacher.columns.rows == student.columns.rows, "lk: teacher_weight has ", teacher.columns.rows,
                          " classes, and linear_weight ", student.columns.rows);
        TORCH_CHECK_VALUE((float)logit_scale != 0 && (float)teacher_scale != 0, "lk: a scale is 0; it must be above 0");
        TORCH_CHECK_VALUE(workspace_mib >= 0, "lk: workspace_mib is ", workspace_mib, "; it must be at least 1");
        fill_row_weight(a, input.all, row_weight, &w);
        TORCH_CHECK_VALUE(!max_counted || w.defined(), "lk: max_counted needs row_weight, which says which tokens count");
        a.x = student.rows.data(), a.x_stride = student.rows.stride, a.tokens = student.rows.rows;
        a.hidden = student.rows.cols, a.vocab = student.columns.rows, a.dweight_dtype = student.dweight_dtype;
        a.weight = student.columns.data(), a.weight_stride = student.columns.stride, a.bias = student.bias();
        a.teacher_x = teacher.rows.data(), a.teacher_x_stride = teacher.rows.stride, a.teacher_hidden = teacher.rows.cols;
        a.teacher_weight = teacher.columns.data(), a.teacher_weight_stride = teacher.columns.stride;
        a.teacher_bias = teacher.bias();
        a.divergence = (int)divergence, a.beta = (float)beta;
        a.logit_scale = (float)logit_scale, a.teacher_scale = (float)teacher_scale;
        a.softcap = (float)softcap, a.teacher_softcap = (float)teacher_softcap;
        a.max_counted = (int)std::clamp<int64_t>(max_counted, -1, INT32_MAX);
        a.fast_logits = fast_logits, a.tf32 = x.scalar_type() == at::kFloat && at::globalContext().allowTF32CuBLAS();
        budget = (size_t)workspace_mib << 20;
        if (reduction != LK_REDUCTION_MEAN) return;
        denominator = w.defined() ? w.sum() : at::full({}, (double)a.tokens, x.options().dtype(at::kFloat));
    }
    void want_entropy_of(const Tensor &loss, bool wanted)
    {
        if (wanted) entropy = make(loss.sizes(), loss), a.entropy = entropy.mutable_data_ptr<float>();
    }
    // The gradient of the op's result, undefined for 1: that of each token, or of one number.
    void take_upstream(const Maybe &upstream, bool per_token)
    {
        up = has(upstream) ? upstream->contiguous() : Tensor();
        if (has(denominator)) up = up.defined() ? at::div(up, *denominator) : at::reciprocal(*denominator);
        if (up.defined()) a.upstream = up.const_data_ptr<float>(), a.upstream_per_token = per_token;
    }
    void gather() { input.gather(), teacher_input.gather(); }
    at::IntArrayRef tokens() const { return input.all.sizes().slice(0, input.all.dim() - 1); }
    void want(const Tensor &weight, bool want_dx, bool want_dweight, bool want_dbias)
    {
        if (want_dx) dx = make(a.tokens ? input.all.sizes() : input.mine.sizes(), input.all), a.dx = dx.mutable_data_ptr();
        if (want_dweight) dweight = make(weight.sizes(), weight), a.dweight = dweight.mutable_data_ptr();
        if (want_dbias) dbias = make({a.vocab}, student.b), a.dbias = dbias.mutable_data_ptr();
    }
    void take_columns(int64_t first, int64_t count)
    {
        a.weight = element(student.columns.t, student.columns.data(), first * student.columns.distance()), a.vocab = count;
        a.teacher_weight = element(teacher.columns.t, teacher.columns.data(), first * teacher.columns.distance());
        if (student.b.defined()) a.bias = element(student.b, student.bias(), first);
        if (teacher.b.defined()) a.teacher_bias = element(teacher.b, teacher.bias(), first);
    }
    // Of forward: what backward will need for these gradients.
    void expect_backward(const Tensor &x, int64_t reduction, bool want_dx, bool want_dweight, bool want_dbias)
    {
        if (!budget || !(want_dx || want_dweight || want_dbias)) return;
        lk_linear_kl_parallel_args back = split;
        lk_linear_kl_plan plan = {};
        back.common.dx = want_dx ? &back : nullptr, back.common.dweight = want_dweight ? &back : nullptr;
        back.common.dbias = want_dbias ? &back : nullptr;
        back.common.upstream = (const float *)&back, back.common.upstream_per_token = !reduction;
        if (!split.parallel.vocab_total) LK_RUN(lk_linear_kl_backward_plan, x, &back.common, SIZE_MAX, &plan);
        else LK_RUN(lk_linear_kl_parallel_backward_plan, x, &back, SIZE_MAX, &plan);
        backward_least = plan.minimum_bytes;
    }
    Tensor reduced(const Tensor &loss, int64_t reduction) const
    {
        if (reduction == LK_REDUCTION_NONE) return loss;
        return has(denominator) ? at::div(loss.sum(), *denominator) : loss.sum();
    }
};
// A budget of 0 is lk's own.
#define RUN(name, args, call, x)                                                                                               \
    do {                                                                                                                       \
        lk_linear_kl_plan plan = {};                                                                                           \
        if (call.budget) {                                                                                                     \
            LK_RUN(name##_plan, x, args, SIZE_MAX, &plan);                                                                     \
            check_budget(call.budget, std::max(plan.minimum_bytes, call.backward_least));                                      \
        }                                                                                                                      \
        if (call.budget) LK_RUN(name##_plan, x, args, call.budget, &plan);                                                     \
        else LK_RUN(name##_workspace_bytes, x, args, &plan.workspace_bytes);                                                   \
        const Workspace workspace(call.a.workspace_bytes = plan.workspace_bytes);                                              \
        call.a.workspace = workspace.start;                                                                                    \
        call.gather();                                                                                                         \
        const Locked<lk_linear_kl_context> locked(x, lk_linear_kl_init);                                                       \
        call.a.context = locked.context;                                                                                       \
        LK_RUN(name, x, args, call.stream);                                                                                    \
    } while (0)

// loss and, if wanted, entropy
static tuple<Tensor, Tensor> linear_kl_forward(PARAMETERS, bool want_entropy, bool want_dx, bool want_dweight, bool want_dbias)
{
    HeadsCall c(ARGUMENTS);
    c.expect_backward(x, reduction, want_dx, want_dweight, want_dbias);
    const Tensor loss = make(x.sizes().slice(0, x.dim() - 1), x, at::kFloat);
    c.a.loss = loss.mutable_data_ptr<float>(), c.want_entropy_of(loss, want_entropy);
    RUN(lk_linear_kl_forward, &c.a, c, x);
    return {c.reduced(loss, reduction), c.entropy};
}

// loss, entropy if wanted, and the wanted gradients for one upstream gradient, without one for 1
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor> linear_kl_forward_backward(PARAMETERS, const Maybe &upstream,
                                                                                bool want_entropy, bool want_dx,
                                                                                bool want_dweight, bool want_dbias)
{
    HeadsCall c(ARGUMENTS);
    TORCH_CHECK_VALUE(reduction, "lk: a loss for each token needs its upstream gradients; call forward and backward");
    const Tensor loss = make(x.sizes().slice(0, x.dim() - 1), x, at::kFloat);
    c.a.loss = loss.mutable_data_ptr<float>(), c.want_entropy_of(loss, want_entropy);
    c.take_upstream(upstream, false), c.want(weight, want_dx, want_dweight, want_dbias);
    RUN(lk_linear_kl_forward_backward, &c.a, c, x);
    return {c.reduced(loss, reduction), c.entropy, c.dx, c.dweight, c.dbias};
}

static tuple<Tensor, Tensor, Tensor> linear_kl_backward(const Tensor &dloss, PARAMETERS, bool want_dx, bool want_dweight,
                                                        bool want_dbias)
{
    HeadsCall c(ARGUMENTS);
    if (!want_dx && !want_dweight && !want_dbias) return {};
    c.take_upstream(dloss, reduction == LK_REDUCTION_NONE), c.want(weight, want_dx, want_dweight, want_dbias);
    RUN(lk_linear_kl_backward, &c.a, c, x);
    return {c.dx, c.dweight, c.dbias};
}

// loss and, if wanted, entropy, the same bits on every rank, and the states of all classes, which backward needs. One all-gather, or
// two in jensen_shannon and total_variation, of 32 bytes a token.
static tuple<Tensor, Tensor, Tensor> linear_kl_parallel_forward(PARAMETERS, LK_HEAD_RANKS_PARAMETERS, bool want_entropy, bool want_dx,
                                                                bool want_dweight, bool want_dbias)
{
    HeadsCall c(ARGUMENTS, LK_HEAD_RANKS);
    c.expect_backward(x, reduction, want_dx, want_dweight, want_dbias);
    const Tensor loss = make(c.tokens(), x, at::kFloat), merged = make({c.a.tokens, 8}, x, at::kFloat);
    Tensor all;
    c.want_entropy_of(loss, want_entropy);
    if (!c.a.tokens) return {c.reduced(loss, reduction), c.entropy, merged};
    const Tensor states = make({slices * c.a.tokens, 8}, x, at::kFloat);
    const auto take = [&](int64_t first, int64_t count) { c.take_columns(first, count); };
    const auto gather = [&] {
        all = gather_states(states, LK_RANKS);
        c.split.all_states = all.const_data_ptr();
    };
    run_slices(c.split, LK_SHARDS, states, take, [&] { RUN(lk_linear_kl_parallel_forward, &c.split, c, x); });
    gather();
    if (LK_KL_HAS_BETWEEN(divergence)) {
        if (group.empty()) all = states.clone(), c.split.all_states = all.const_data_ptr(); // between reads all, and writes states
        run_slices(c.split, LK_SHARDS, states, take, [&] { RUN(lk_linear_kl_parallel_between, &c.split, c, x); });
        gather();
    }
    c.split.states = merged.mutable_data_ptr(), c.a.loss = loss.mutable_data_ptr<float>();
    LK_RUN(lk_linear_kl_parallel_finish, x, &c.split, c.stream);
    return {c.reduced(loss, reduction), c.entropy, merged};
}

static tuple<Tensor, Tensor, Tensor> linear_kl_parallel_backward(const Tensor &dloss, const Tensor &states, PARAMETERS,
                                                                 LK_HEAD_RANKS_PARAMETERS, bool want_dx, bool want_dweight,
                                                                 bool want_dbias)
{
    HeadsCall c(ARGUMENTS, LK_HEAD_RANKS);
    const Tensor saved = aligned(states);
    if (!want_dx && !want_dweight && !want_dbias) return {};
    c.split.states = (void *)saved.const_data_ptr(), c.split.parallel.user = &c;
    c.split.parallel.reduce = parts == 1 ? sum_dx<HeadsCall> : scatter_dx<HeadsCall>;
    c.take_upstream(dloss, reduction == LK_REDUCTION_NONE), c.want(weight, want_dx, want_dweight, want_dbias);
    if (!want_dx && !c.a.vocab) { // empty tensors, whose NULL lk would not take for an output
        c.gather();
        return {c.dx, c.dweight, c.dbias};
    }
    RUN(lk_linear_kl_parallel_backward, &c.split, c, x);
    if (want_dx && c.a.tokens) wait(c.dx);
    return {c.dx, c.dweight, c.dbias};
}

struct LinearKlBackward : Node {
    SavedVariable x, weight, teacher_input, teacher_weight, bias, teacher_bias, row_weight, states;
    std::string group;
    std::vector<int64_t> shards; // empty: the classes are not split
    int64_t rank = 0, slices = 1, parts = 1;
    int64_t reduction, divergence, workspace_mib, max_counted;
    double beta, logit_scale, teacher_scale, softcap, teacher_softcap;
    bool fast_logits;
    variable_list apply(variable_list &&up) override
    {
        LK_OP(linear_kl_backward);
        LK_OP(linear_kl_parallel_backward);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!up[0].defined()) return variable_list(3);
        const Tensor in = x.unpack(), w = weight.unpack(), other = teacher_input.unpack(), other_w = teacher_weight.unpack();
        const Maybe b = maybe(bias.unpack()), other_b = maybe(teacher_bias.unpack()), factors = maybe(row_weight.unpack());
        const Tensor of_all = states.unpack();
        const Below below;
        const bool wants[] = {task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
        auto [dx, dweight, dbias] =
            shards.empty() ? linear_kl_backward_op.call(up[0], in, w, other, other_w, b, other_b, factors, OPTIONS, wants[0], wants[1],
                                                       wants[2])
                          : linear_kl_parallel_backward_op.call(up[0], of_all, in, w, other, other_w, b, other_b, factors, OPTIONS,
                                                                LK_HEAD_RANKS, wants[0], wants[1], wants[2]);
        return once(*this, up, {dx, dweight, dbias}, "linear_kl");
    }
    void release_variables() override
    {
        x.reset_data(), weight.reset_data(), teacher_input.reset_data(), teacher_weight.reset_data();
        bias.reset_data(), teacher_bias.reset_data(), row_weight.reset_data(), states.reset_data();
    }
    void keep(PARAMETERS)
    {
        this->x = save(x), this->weight = save(weight), this->bias = save(bias), this->row_weight = save(row_weight);
        this->teacher_input = save(teacher_input), this->teacher_weight = save(teacher_weight);
        this->teacher_bias = save(teacher_bias);
        this->reduction = reduction, this->divergence = divergence, this->beta = beta;
        this->logit_scale = logit_scale, this->teacher_scale = teacher_scale;
        this->softcap = softcap, this->teacher_softcap = teacher_softcap;
        this->workspace_mib = workspace_mib, this->fast_logits = fast_logits, this->max_counted = max_counted;
    }
};

static void check_heads(PARAMETERS)
{
    check_input(x, "input");
    const std::pair<const char *, Maybe> constants[] = {{"teacher_input", teacher_input}, {"teacher_weight", teacher_weight},
                                                        {"teacher_bias", teacher_bias}, {"row_weight", row_weight}};
    for (const auto &[name, t] : constants)
        TORCH_CHECK_VALUE(!wants_gradient(t), "lk: ", name, " requires a gradient, and gets none; detach it");
}

// A reduced loss computes its gradients in forward: four matmuls, not six. Not in f16 without a known upstream gradient: see
// linear_cross_entropy. entropy has no gradient, and is undefined where it is not wanted.
tuple<Tensor, Tensor> linear_kl(PARAMETERS, const Maybe &grad_scale, bool want_entropy)
{
    LK_OP(linear_kl_forward);
    LK_OP(linear_kl_forward_backward);
    check_heads(ARGUMENTS);
    if (!wants_gradient(x, weight, bias)) {
        const Below below;
        return linear_kl_forward_op.call(ARGUMENTS, want_entropy, false, false, false);
    }
    if (reduction != LK_REDUCTION_NONE && (x.scalar_type() != at::kHalf || has(grad_scale))) {
        const Expected expected = expected_upstream(x, grad_scale, Reduced::LINEAR_KL);
        const auto node = make_node<LossBackward>(x, weight, bias.value_or(Tensor()));
        Tensor loss, entropy, dx, dweight, dbias;
        {
            const Below below;
            std::tie(loss, entropy, dx, dweight, dbias) = linear_kl_forward_backward_op.call(
                ARGUMENTS, maybe(expected.upstream), want_entropy, x.requires_grad(), weight.requires_grad(),
                has(bias) && bias->requires_grad());
        }
        torch::autograd::set_history(loss, node);
        node->keep({dx, dweight, dbias}, expected);
        node_is_made(node);
        return {loss, entropy};
    }
    const auto node = make_node<LinearKlBackward>(x, weight, bias.value_or(Tensor()));
    Tensor loss, entropy;
    {
        const Below below;
        std::tie(loss, entropy) = linear_kl_forward_op.call(ARGUMENTS, want_entropy, x.requires_grad(), weight.requires_grad(),
                                                            has(bias) && bias->requires_grad());
    }
    torch::autograd::set_history(loss, node);
    node->keep(ARGUMENTS);
    node_is_made(node);
    return {loss, entropy};
}

// The classes split over ranks: forward and backward have collectives, and gradients are computed in backward.
static tuple<Tensor, Tensor> linear_kl_parallel(PARAMETERS, LK_HEAD_RANKS_PARAMETERS, bool want_entropy)
{
    LK_OP(linear_kl_parallel_forward);
    check_heads(ARGUMENTS);
    const bool wanted = wants_gradient(x, weight, bias);
    const auto node = wanted ? make_node<LinearKlBackward>(x, weight, bias.value_or(Tensor())) : nullptr;
    Tensor loss, entropy, states;
    {
        const Below below;
        std::tie(loss, entropy, states) = linear_kl_parallel_forward_op.call(
            ARGUMENTS, LK_HEAD_RANKS, want_entropy, wanted && x.requires_grad(), wanted && weight.requires_grad(),
            wanted && has(bias) && bias->requires_grad());
    }
    if (!wanted) return {loss, entropy};
    torch::autograd::set_history(loss, node);
    node->group = group, node->shards = shards.vec(), node->rank = rank, node->slices = slices;
    node->parts = parts, node->states = save(states);
    node->keep(ARGUMENTS);
    node_is_made(node);
    return {loss, entropy};
}

// As F.linear: the matmuls' tensors in autocast's type.
template <class Op, class... More> static tuple<Tensor, Tensor> autocast(const Op &op, PARAMETERS, const More &...more)
{
    const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKeySet(c10::DispatchKey::LK_AUTOCAST));
    const at::ScalarType type = at::autocast::get_autocast_dtype(LK_DEVICE_TYPE);
    const auto cast = [&](const auto &t) { return at::autocast::cached_cast(type, t, LK_DEVICE_TYPE); };
    return op.call(cast(x), cast(weight), cast(teacher_input), cast(teacher_weight), cast(bias), cast(teacher_bias), row_weight,
                   OPTIONS, more...);
}
static tuple<Tensor, Tensor> linear_kl_autocast(PARAMETERS, const Maybe &grad_scale, bool want_entropy)
{
    LK_OP(linear_kl);
    return autocast(linear_kl_op, ARGUMENTS, grad_scale, want_entropy);
}
static tuple<Tensor, Tensor> linear_kl_parallel_autocast(PARAMETERS, LK_HEAD_RANKS_PARAMETERS, bool want_entropy)
{
    LK_OP(linear_kl_parallel);
    return autocast(linear_kl_parallel_op, ARGUMENTS, LK_HEAD_RANKS, want_entropy);
}

#define INPUTS                                                                                                                 \
    "Tensor x, Tensor weight, Tensor teacher_input, Tensor teacher_weight, Tensor? bias, Tensor? teacher_bias, "               \
    "Tensor? row_weight, int reduction, int divergence, float beta, float logit_scale, float teacher_scale, float softcap, "   \
    "float teacher_softcap, int workspace_mib, bool fast_logits, int max_counted"
#define WANTS ", bool want_dx, bool want_dweight, bool want_dbias"
#define WANT_ENTROPY ", bool want_entropy"
LK_OPS(m)
{
    user_op(m, "linear_kl", "(" INPUTS ", Tensor? grad_scale" WANT_ENTROPY ") -> (Tensor, Tensor)", &linear_kl);
    kernel(m, "linear_kl_forward", "(" INPUTS WANT_ENTROPY WANTS ") -> (Tensor, Tensor)", &linear_kl_forward);
    kernel(m, "linear_kl_forward_backward", "(" INPUTS ", Tensor? upstream" WANT_ENTROPY WANTS
           ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)", &linear_kl_forward_backward);
    kernel(m, "linear_kl_backward", "(Tensor dloss, " INPUTS WANTS ") -> (Tensor, Tensor, Tensor)", &linear_kl_backward);
    user_op(m, "linear_kl_parallel", "(" INPUTS LK_HEAD_RANKS_SCHEMA WANT_ENTROPY ") -> (Tensor, Tensor)", &linear_kl_parallel);
    kernel(m, "linear_kl_parallel_forward", "(" INPUTS LK_HEAD_RANKS_SCHEMA WANT_ENTROPY WANTS ") -> (Tensor, Tensor, Tensor)",
           &linear_kl_parallel_forward);
    kernel(m, "linear_kl_parallel_backward", "(Tensor dloss, Tensor states, " INPUTS LK_HEAD_RANKS_SCHEMA WANTS
           ") -> (Tensor, Tensor, Tensor)", &linear_kl_parallel_backward);
    m.impl("linear_kl", torch::dispatch(c10::DispatchKey::LK_AUTOCAST, &linear_kl_autocast));
    m.impl("linear_kl_parallel", torch::dispatch(c10::DispatchKey::LK_AUTOCAST, &linear_kl_parallel_autocast));
}

} // namespace lk_torch

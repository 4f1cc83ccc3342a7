// SPDX-License-Identifier: MIT
// cross_entropy and cross_entropy_stats: lk/cross_entropy.cuh.
#include "lk_torch.h"

#include "lk/cross_entropy.cuh"
#include "lk/lk_scale.cuh"
LK_DECLARE_ALL(CROSS_ENTROPY)
LK_DECLARE_ALL(SCALE)

namespace lk_torch {

variable_list once(variable_list gradients, const char *op)
{
    if (!at::GradMode::is_enabled()) return gradients;
    for (Tensor &g : gradients)
        if (g.defined()) g = g.detach().set_requires_grad(true);
    const auto node = std::make_shared<torch::autograd::DelayedError>(c10::str("lk: ", op, " has no second derivative"),
                                                                      (int64_t)gradients.size());
    return node->apply(std::move(gradients));
}

// Where nothing reads the saved gradients again they are scaled in place, which reads and writes nothing for an upstream of 1.
variable_list LossBackward::apply(variable_list &&upstream)
{
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list d(gradients.size());
    if (!upstream[0].defined()) return d;
    const bool keep = torch::autograd::get_current_graph_task_keep_graph();
    for (size_t i = 0; i < d.size(); i++) {
        if (!task_should_compute_output(i)) continue;
        d[i] = gradients[i].unpack();
        const Below below;
        if (traced(d[i]) || traced(upstream[0])) { // in float, as lk_scale: at::mul alone would round upstream to d's type
            d[i] = at::mul(d[i].to(at::kFloat), upstream[0]).to(d[i].scalar_type());
            continue;
        }
        if (keep) d[i] = d[i].clone();
        else gradients[i].reset_data(); // now .grad can take the memory as its own
        const Stream stream(d[i]);
        LK_RUN(lk_scale, d[i], d[i].mutable_data_ptr(), d[i].numel(), upstream[0].const_data_ptr<float>(), stream);
    }
    return once(std::move(d), "a loss");
}

// Class probabilities, as F.cross_entropy takes them for a target: of a floating type, in the shape of the logits.
static bool probable(const Tensor &target) { return target.is_floating_point(); }
static at::IntArrayRef target_sizes(const Tensor &target)
{
    return probable(target) ? target.sizes().slice(0, target.dim() - 1) : target.sizes();
}
static Rows fill_prob(lk_cross_entropy_args &a, const Tensor &x, const Tensor &prob, int64_t ignore_index)
{
    TORCH_CHECK_VALUE(prob.sizes() == x.sizes(), "lk: target has shape ", prob.sizes(), "; probabilities of classes need ",
                      x.sizes());
    TORCH_CHECK_VALUE(ignore_index < 0, "lk: ignore_index is ", ignore_index,
                      "; it does not apply to probabilities of classes");
    const Rows rows(prob, "target");
    a.target_prob = rows.data(), a.target_prob_stride = rows.stride;
    a.target_prob_dtype = type_beside(prob, x.scalar_type(), "target, as probabilities of classes,");
    return rows;
}

// The arguments that all calls have, and what keeps their memory.
struct LossCall {
    lk_cross_entropy_args a = {};
    Stream stream;
    Rows logits;
    Tensor target, weight, divisor;
    LossCall(const Tensor &x, const Tensor &t, const Maybe &w, LK_LOSS_PARAMETERS)
        : stream((check_input(x, "input"), check_device(x, t, "target"), check_device(x, w, "weight"),
                  check_device(x, denominator, "denominator"), x)), logits(x, "input")
    {
        if (probable(t)) target = fill_prob(a, x, t, ignore_index).t;
        else fill_target(a, x, t, &target);
        fill_loss(a, w, logits.cols, &weight, &divisor, LK_LOSS_OPTIONS);
        a.logits = logits.data(), a.logits_stride = logits.stride, a.rows = logits.rows, a.vocab = logits.cols;
    }
};

static Tensor loss_like(const Tensor &target, const Tensor &x, int64_t reduction)
{
    return make(reduction ? at::IntArrayRef() : target_sizes(target), x, at::kFloat);
}
// What backward needs, in one tensor: for mean, unless the targets are probabilities, valid_rows (two floats' bytes), and with
// class weights weight_sum; then lse_low, and lse where it is no result of its own.
static int64_t state_head(const LossCall &c)
{
    return c.a.reduction == LK_REDUCTION_MEAN && !probable(c.target) ? 2 + !!c.a.class_weight : 0;
}
static void set_state(LossCall &c, const Tensor &state, const Maybe &lse)
{
    lk_cross_entropy_args &a = c.a;
    float *f = (float *)state.const_data_ptr();
    if (state_head(c)) a.valid_rows = (int64_t *)f;
    if (state_head(c) && a.class_weight) a.weight_sum = f + 2;
    a.lse_low = f + state_head(c), a.lse = has(lse) ? (float *)lse->const_data_ptr() : a.lse_low + a.rows;
}
static void forward(LossCall &c, const Tensor &x)
{
    LK_RUN(lk_cross_entropy_forward_workspace_bytes, x, &c.a, &c.a.workspace_bytes);
    const Workspace workspace(c.a.workspace_bytes);
    c.a.workspace = workspace.start;
    LK_RUN(lk_cross_entropy_forward, x, &c.a, c.stream);
}

static tuple<Tensor, Tensor> cross_entropy_forward(const Tensor &logits, const Tensor &target, const Maybe &class_weight,
                                                   LK_LOSS_PARAMETERS, bool keep)
{
    LossCall c(logits, target, class_weight, LK_LOSS_OPTIONS);
    Tensor loss = loss_like(target, logits, reduction), state;
    c.a.loss = loss.mutable_data_ptr<float>();
    if (keep) set_state(c, state = make({state_head(c) + 2 * c.a.rows}, logits, at::kFloat), {});
    forward(c, logits);
    return {loss, state};
}

// loss, lse, z_loss, entropy, argmax, and what backward needs
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
cross_entropy_stats_forward(const Tensor &logits, const Tensor &target, const Maybe &class_weight, LK_LOSS_PARAMETERS)
{
    LossCall c(logits, target, class_weight, LK_LOSS_OPTIONS);
    Tensor loss = loss_like(target, logits, reduction), z = loss_like(target, logits, reduction);
    Tensor lse = loss_like(target, logits, 0), entropy = loss_like(target, logits, 0);
    Tensor argmax = make(target_sizes(target), logits, at::kLong), state = make({state_head(c) + c.a.rows}, logits, at::kFloat);
    set_state(c, state, lse);
    c.a.loss = loss.mutable_data_ptr<float>(), c.a.z_loss_out = z.mutable_data_ptr<float>();
    c.a.entropy = entropy.mutable_data_ptr<float>(), c.a.argmax = argmax.mutable_data_ptr<int64_t>();
    forward(c, logits);
    return {loss, lse, z, entropy, argmax, state};
}

static tuple<Tensor, Tensor> cross_entropy_forward_backward(const Tensor &logits, const Tensor &target,
                                                            const Maybe &class_weight, LK_LOSS_PARAMETERS)
{
    LossCall c(logits, target, class_weight, LK_LOSS_OPTIONS);
    Tensor loss = loss_like(target, logits, reduction), d = make(logits.sizes(), logits);
    c.a.loss = loss.mutable_data_ptr<float>(), c.a.dlogits = d.mutable_data_ptr();
    LK_RUN(lk_cross_entropy_forward_backward_workspace_bytes, logits, &c.a, &c.a.workspace_bytes);
    const Workspace workspace(c.a.workspace_bytes);
    c.a.workspace = workspace.start;
    LK_RUN(lk_cross_entropy_forward_backward, logits, &c.a, c.stream);
    return {loss, d};
}

// lse and entropy: those of cross_entropy_stats. entropy is read with dentropy alone.
static Tensor cross_entropy_backward(const Maybe &dloss, const Maybe &dlse, const Maybe &dentropy, const Tensor &logits,
                                     const Tensor &target, const Maybe &class_weight, const Maybe &lse, const Maybe &entropy,
                                     const Tensor &state, LK_LOSS_PARAMETERS)
{
    LossCall c(logits, target, class_weight, LK_LOSS_OPTIONS);
    const Tensor saved = state.contiguous();
    // No gradient of the loss is 0, but lk's NULL is 1.
    const Tensor up = has(dloss) ? dloss->contiguous() : at::zeros({}, logits.options().dtype(at::kFloat));
    const Maybe dl = packed(dlse), de = packed(dentropy), l = packed(lse), h = packed(entropy);
    Tensor d = make(logits.sizes(), logits);
    set_state(c, saved, l);
    c.a.upstream = up.const_data_ptr<float>(), c.a.upstream_per_row = has(dloss) && !reduction;
    if (has(dl)) c.a.dlse = dl->const_data_ptr<float>();
    if (has(de)) c.a.dentropy = de->const_data_ptr<float>(), c.a.entropy = (float *)h->const_data_ptr();
    c.a.dlogits = d.mutable_data_ptr();
    LK_RUN(lk_cross_entropy_backward, logits, &c.a, c.stream);
    return d;
}

// Outputs with a gradient: loss, and lse and entropy of cross_entropy_stats.
struct CrossEntropyBackward : Node {
    SavedVariable logits, target, weight, lse, entropy, state, divisor;
    bool stats;
    int64_t reduction, ignore_index;
    double label_smoothing, z_loss, softcap, logit_scale;
    bool zero_when_empty;
    variable_list apply(variable_list &&up) override
    {
        LK_OP(cross_entropy_backward);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!up[0].defined() && !(stats && (up[1].defined() || up[2].defined()))) return variable_list(1);
        const Tensor x = logits.unpack(), t = target.unpack(), w = weight.unpack(), s = state.unpack();
        const Tensor l = stats ? lse.unpack(shared_from_this()) : Tensor();
        const Tensor h = stats ? entropy.unpack(shared_from_this()) : Tensor();
        const Maybe dlse = stats ? maybe(up[1]) : Maybe(), dentropy = stats ? maybe(up[2]) : Maybe();
        const Maybe denominator = maybe(divisor.unpack());
        const Below below;
        return once({cross_entropy_backward_op.call(maybe(up[0]), dlse, dentropy, x, t, maybe(w), maybe(l), maybe(h), s,
                                                    LK_LOSS_OPTIONS)}, "cross_entropy");
    }
    void release_variables() override
    {
        logits.reset_data(), target.reset_data(), weight.reset_data(), lse.reset_data(), entropy.reset_data();
        state.reset_data(), divisor.reset_data();
    }
    void keep(const Tensor &x, const Tensor &t, const Maybe &w, const Tensor &s, LK_LOSS_PARAMETERS)
    {
        logits = save(x), target = save(t), weight = save(w), state = save(s);
        this->reduction = reduction, this->ignore_index = ignore_index, this->label_smoothing = label_smoothing;
        this->z_loss = z_loss, this->softcap = softcap, this->logit_scale = logit_scale;
        this->zero_when_empty = zero_when_empty, divisor = save(denominator);
    }
};

// A reduced loss in eager mode makes its gradient in forward: one reading of the logits and one writing, and no logits to keep.
// A traced graph cannot scale in place, so there forward and backward are separate, as they are without a reduction and in f16.
// There a gradient for an upstream of 1 is too small: what rounding takes off, a loss scale does not bring back.
Tensor cross_entropy(const Tensor &logits, const Tensor &target, const Maybe &class_weight, LK_LOSS_PARAMETERS)
{
    LK_OP(cross_entropy_forward);
    LK_OP(cross_entropy_forward_backward);
    check_input(logits, "input"), check_constants(target, class_weight, denominator);
    if (!wants_gradient(logits)) {
        const Below below;
        return std::get<0>(cross_entropy_forward_op.call(logits, target, class_weight, LK_LOSS_OPTIONS, false));
    }
    Tensor loss, saved;
    if (reduction != LK_REDUCTION_NONE && logits.scalar_type() != at::kHalf && !traced(logits)) {
        const auto node = make_node<LossBackward>(logits);
        {
            const Below below;
            std::tie(loss, saved) = cross_entropy_forward_backward_op.call(logits, target, class_weight, LK_LOSS_OPTIONS);
        }
        torch::autograd::set_history(loss, node);
        node->gradients.push_back(save(saved));
    } else {
        const auto node = make_node<CrossEntropyBackward>(logits);
        {
            const Below below;
            std::tie(loss, saved) = cross_entropy_forward_op.call(logits, target, class_weight, LK_LOSS_OPTIONS, true);
        }
        torch::autograd::set_history(loss, node);
        node->stats = false, node->keep(logits, target, class_weight, saved, LK_LOSS_OPTIONS);
    }
    return loss;
}

tuple<Tensor, Tensor, Tensor, Tensor, Tensor> cross_entropy_stats(const Tensor &logits, const Tensor &target,
                                                                  const Maybe &class_weight, LK_LOSS_PARAMETERS)
{
    LK_OP(cross_entropy_stats_forward);
    check_input(logits, "input"), check_constants(target, class_weight, denominator);
    const bool wanted = wants_gradient(logits);
    const auto node = wanted ? make_node<CrossEntropyBackward>(logits) : nullptr;
    Tensor loss, lse, z, entropy, argmax, state;
    {
        const Below below;
        std::tie(loss, lse, z, entropy, argmax, state) =
            cross_entropy_stats_forward_op.call(logits, target, class_weight, LK_LOSS_OPTIONS);
    }
    if (wanted) {
        for (const Tensor &out : {loss, lse, entropy}) torch::autograd::set_history(out, node);
        node->stats = true, node->lse = SavedVariable(lse, true), node->entropy = SavedVariable(entropy, true);
        node->keep(logits, target, class_weight, state, LK_LOSS_OPTIONS);
    }
    return {loss, lse, z, entropy, argmax};
}

#define INPUTS "Tensor logits, Tensor target, Tensor? class_weight, "
TORCH_LIBRARY_FRAGMENT(lk, m)
{
    user_op(m, "cross_entropy", "(" INPUTS LK_LOSS_SCHEMA ") -> Tensor", &cross_entropy);
    user_op(m, "cross_entropy_stats", "(" INPUTS LK_LOSS_SCHEMA ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
            &cross_entropy_stats);
    kernel(m, "cross_entropy_forward", "(" INPUTS LK_LOSS_SCHEMA ", bool keep) -> (Tensor, Tensor)", &cross_entropy_forward);
    kernel(m, "cross_entropy_stats_forward", "(" INPUTS LK_LOSS_SCHEMA ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
           &cross_entropy_stats_forward);
    kernel(m, "cross_entropy_forward_backward", "(" INPUTS LK_LOSS_SCHEMA ") -> (Tensor, Tensor)",
           &cross_entropy_forward_backward);
    kernel(m, "cross_entropy_backward", "(Tensor? dloss, Tensor? dlse, Tensor? dentropy, " INPUTS
           "Tensor? lse, Tensor? entropy, Tensor state, " LK_LOSS_SCHEMA ") -> Tensor", &cross_entropy_backward);
}

} // namespace lk_torch

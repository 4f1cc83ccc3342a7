// SPDX-License-Identifier: MIT
// cross_entropy, cross_entropy_with_grad and cross_entropy_stats: lk/cross_entropy.cuh, and lk/cross_entropy_probabilities.cuh for class probabilities.
#include "lk_torch.h"

#include <cmath>
#include <cstring>
#include <map>

#include "lk/cross_entropy.cuh"
#include "lk/cross_entropy_parallel.cuh"
#include "lk/cross_entropy_probabilities.cuh"
#include "lk/lk_scale.cuh"
LK_DECLARE_ALL(CROSS_ENTROPY)
LK_DECLARE_ALL(CROSS_ENTROPY_PROBABILITIES)
LK_DECLARE_ALL(CROSS_ENTROPY_PARALLEL)
LK_DECLARE_ALL(SCALE)

namespace lk_torch {

variable_list once(Node &node, const variable_list &upstream, variable_list gradients, const char *op)
{
    for (size_t i = 0; i < gradients.size(); i++)
        if (!node.task_should_compute_output(i)) gradients[i].reset();
    if (!at::GradMode::is_enabled()) return gradients;
    torch::autograd::edge_list edges = node.next_edges();
    for (const Tensor &g : upstream)
        if (g.defined() && g.requires_grad()) edges.push_back(torch::autograd::impl::gradient_edge(g));
    const auto error = new_node<torch::autograd::Error>(c10::str("lk: ", op, " has no second derivative"), std::move(edges));
    for (Tensor &g : gradients)
        if (g.defined()) torch::autograd::set_history(g = g.detach(), error);
    return gradients;
}

// lk_rescale's history of each device and loss. The first call makes it, and waits until it is there, since other streams may
// read it. A first call in a capture cannot wait; it does without.
static Tensor history_of(const Tensor &x, Reduced loss)
{
    static auto &histories = *new std::map<std::pair<int, Reduced>, Tensor>;
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    Tensor &h = histories[{x.device().index(), loss}];
    if (h.defined()) return h;
#ifndef LK_TORCH_CPU
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return {};
#endif
    const Below below;
    h = make({2}, x, at::kFloat).fill_(1);
#ifndef LK_TORCH_CPU
    c10::cuda::getCurrentCUDAStream(x.get_device()).synchronize();
#endif
    return h;
}

Expected expected_upstream(const Tensor &x, const Maybe &grad_scale, Reduced loss)
{
    if (has(grad_scale)) {
        TORCH_CHECK_VALUE(grad_scale->numel() == 1, "lk: grad_scale has shape ", grad_scale->sizes(), "; it must be one number");
        TORCH_CHECK_VALUE(!wants_gradient(*grad_scale), "lk: grad_scale requires a gradient, and gets none; detach it");
        const Below below;
        if (grad_scale->device() == x.device() && grad_scale->scalar_type() == at::kFloat) return {*grad_scale, {}};
        if (grad_scale->device() == x.device()) return {grad_scale->to(at::kFloat), {}};
        if (traced(x)) return {grad_scale->to(x.device(), at::kFloat), {}};
        TORCH_CHECK_VALUE(grad_scale->device().is_cpu(), "lk: grad_scale is on ", grad_scale->device().str(), ", but ",
                          x.device().str(), " is needed");
        const float value = grad_scale->item<float>();
        TORCH_CHECK_VALUE(std::isfinite(value) && value != 0, "lk: grad_scale is ", value, "; it must be finite and not 0");
        return {value == 1 ? Tensor() : at::full({}, value, x.options().dtype(at::kFloat)), {}};
    }
    // What was expected may round gradients twice or once: where bits must not depend on earlier calls, 1 is expected.
    if (traced(x) || x.scalar_type() == at::kHalf || at::globalContext().deterministicAlgorithms()) return {};
    const Stream stream(x);
    const Tensor history = history_of(x, loss);
    if (!history.defined()) return {};
    const Tensor now = make({}, x, at::kFloat);
#ifdef LK_TORCH_CPU
    std::memcpy(now.mutable_data_ptr(), history.const_data_ptr(), 4);
#else
    C10_CUDA_CHECK(cudaMemcpyAsync(now.mutable_data_ptr(), history.const_data_ptr(), 4, cudaMemcpyDeviceToDevice, stream));
#endif
    return {now, history};
}

// The upstream gradient as lk reads it. PyTorch may keep a sign or a zero aside.
static Tensor upstream_of(const Tensor &g)
{
    if (traced(g)) return g;
    if (g._is_zerotensor()) return at::zeros({}, g.options());
    return g.resolve_neg().to(at::kFloat);
}

// Where nothing else holds the saved gradients they are scaled in place, which reads and writes nothing where upstream is what
// they were made for.
variable_list LossBackward::apply(variable_list &&upstream)
{
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list d(gradients.size());
    if (!upstream[0].defined()) return d;
    const bool keep = torch::autograd::get_current_graph_task_keep_graph();
    for (size_t i = 0; i < d.size(); i++)
        if (task_should_compute_output(i)) d[i] = gradients[i].unpack();
    const Tensor expected = made_for.unpack();
    const Below below;
    const Tensor up = upstream_of(upstream[0]);
    Tensor told = history;
    for (size_t i = 0; i < d.size(); i++) {
        if (!d[i].defined()) continue;
        if (traced(d[i]) || traced(up)) { // in float, as lk_rescale: at::mul alone would round upstream to d's type
            const Tensor factor = expected.defined() ? at::div(up, expected) : up;
            d[i] = at::mul(d[i].to(at::kFloat), factor).to(d[i].scalar_type());
            continue;
        }
        if (!keep) gradients[i].reset_data(); // now .grad can take the memory as its own
        const Tensor made = std::move(d[i]);
        const bool alone = made.use_count() == 1 && made.storage().use_count() == 1;
        const Rows rows(made, "the gradient"); // a hook of saved tensors may give it in any layout
        const Tensor &from = rows.t;
        // What lies between rows is scaled, too, and means nothing. In memory that others hold it might.
        const bool inplace = !keep && (overwrites || alone || !from.is_same(made));
        d[i] = inplace ? from : !from.numel() ? make(from.sizes(), from)
                              : make_rows(from.sizes(), from, from.scalar_type(), rows.offset(), rows.distance());
        const int64_t count = from.numel() ? (rows.rows - 1) * rows.distance() + rows.cols : 0;
        const Stream stream(from);
        const lk_rescale_args a = {from.const_data_ptr(), d[i].mutable_data_ptr(), count, up.const_data_ptr<float>(),
                                   expected.defined() ? expected.const_data_ptr<float>() : nullptr,
                                   told.defined() ? told.mutable_data_ptr<float>() : nullptr};
        LK_RUN(lk_rescale, from, &a, stream);
        told.reset();
    }
    return once(*this, upstream, std::move(d), "a loss");
}

// Class probabilities, as F.cross_entropy takes them for a target: of a floating type, in the shape of the logits.
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
    lk_cross_entropy_parallel_args split = {}; // `parallel` where the classes are
    lk_cross_entropy_args &a = split.common;
    Stream stream;
    Rows logits;
    Tensor target, weight, divisor, factors;
    LossCall(const Tensor &x, const Tensor &t, const Maybe &w, LK_LOSS_PARAMETERS, at::IntArrayRef shards = {}, int64_t rank = 0,
             int64_t slices = 1)
        : stream((check_input(x, "input"), x)), logits(x, "input")
    {
        if (!shards.empty()) {
            fill_slice(split, logits.cols, "input", " classes", LK_SHARDS);
            TORCH_CHECK_VALUE(!probable(t), "lk: with group or vocab_slices, target must be numbers of classes, not probabilities of them");
        }
        if (probable(t)) target = fill_prob(a, x, t, ignore_index).t;
        else fill_target(a, x, t, &target);
        fill_loss(a, x, w, shards.empty() ? logits.cols : split.parallel.vocab_total, &weight, &divisor, &factors, LK_LOSS_OPTIONS);
        a.logits = logits.data(), a.logits_stride = logits.stride, a.rows = logits.rows, a.vocab = logits.cols;
        a.batch_invariant = !probable(t) && batch_invariant_rows();
    }
};

// LK_RUN of the function for c's targets.
#define LOSS_RUN(c, direction, x, ...)                                                                                         \
    do {                                                                                                                       \
        if (probable((c).target)) LK_RUN(lk_cross_entropy_probabilities_##direction, x, __VA_ARGS__);                          \
        else LK_RUN(lk_cross_entropy_##direction, x, __VA_ARGS__);                                                             \
    } while (0)

// A call of a rank.
#define RANK_RUN(direction, c, x)                                                                                              \
    do {                                                                                                                       \
        LK_RUN(lk_cross_entropy_parallel_##direction##_workspace_bytes, x, &(c).split, &(c).a.workspace_bytes);                \
        const Workspace workspace((c).a.workspace_bytes);                                                                      \
        (c).a.workspace = workspace.start;                                                                                     \
        LK_RUN(lk_cross_entropy_parallel_##direction, x, &(c).split, (c).stream);                                              \
    } while (0)

static Tensor loss_like(const Tensor &target, const Tensor &x, int64_t reduction)
{
    return make(reduction ? at::IntArrayRef() : target_sizes(target), x, at::kFloat);
}
// What backward needs, in one tensor: for mean, unless the targets are probabilities, valid_rows (two floats' bytes), and with
// class weights weight_sum and a float of nothing; then lse_low, and lse where it is no result of its own. Its size is a multiple
// of 8 bytes, so that valid_rows is aligned in each part of the tensor that vmap makes of several.
static int64_t state_head(const LossCall &c)
{
    return c.a.reduction == LK_REDUCTION_MEAN && !probable(c.target) ? c.a.class_weight ? 4 : 2 : 0;
}
static Tensor make_state(const LossCall &c, const Tensor &x, int per_row)
{
    return make({(state_head(c) + per_row * c.a.rows + 1) / 2 * 2}, x, at::kFloat);
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
    LOSS_RUN(c, forward_workspace_bytes, x, &c.a, &c.a.workspace_bytes);
    const Workspace workspace(c.a.workspace_bytes);
    c.a.workspace = workspace.start;
    LOSS_RUN(c, forward, x, &c.a, c.stream);
}

static tuple<Tensor, Tensor> cross_entropy_forward(const Tensor &logits, const Tensor &target, const Maybe &class_weight,
                                                   LK_LOSS_PARAMETERS, bool keep)
{
    LossCall c(logits, target, class_weight, LK_LOSS_OPTIONS);
    Tensor loss = loss_like(target, logits, reduction), state;
    c.a.loss = loss.mutable_data_ptr<float>();
    if (keep) set_state(c, state = make_state(c, logits, 2), {});
    forward(c, logits);
    return {loss, state};
}

void Statistics::make_outputs(bool statistics, at::IntArrayRef rows, const Tensor &x)
{
    std::vector<int64_t> four(rows.vec());
    if (statistics) four.insert(four.begin(), 4);
    entropy = make(four, x, at::kFloat), argmax = make(rows, x, at::kLong);
    if (statistics) all = entropy;
}
void Statistics::split()
{
    if (!all.defined()) return;
    const Below below;
    entropy = all.select(0, 0).clone(), statistics = all.narrow(0, 1, 3).clone();
}

// loss, lse, z_loss, entropy, argmax, statistics, and what backward needs
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
cross_entropy_stats_forward(const Tensor &logits, const Tensor &target, const Maybe &class_weight, LK_LOSS_PARAMETERS,
                            bool statistics)
{
    LossCall c(logits, target, class_weight, LK_LOSS_OPTIONS);
    Tensor loss = loss_like(target, logits, reduction), z = loss_like(target, logits, reduction);
    Tensor lse = loss_like(target, logits, 0), state = make_state(c, logits, 1);
    Statistics of_rows;
    of_rows.want(c.a, statistics, target_sizes(target), logits);
    set_state(c, state, lse);
    c.a.loss = loss.mutable_data_ptr<float>(), c.a.z_loss_out = z.mutable_data_ptr<float>();
    forward(c, logits);
    of_rows.split();
    return {loss, lse, z, of_rows.entropy, of_rows.argmax, of_rows.statistics, state};
}

static int dlogits_type(at::ScalarType t)
{
    const std::pair<at::ScalarType, int> types[] = {{at::kFloat, LK_DTYPE_F32}, {at::kHalf, LK_DTYPE_F16},
                                                    {at::kBFloat16, LK_DTYPE_BF16}, {at::kFloat8_e5m2, LK_DTYPE_E5M2}};
    for (const auto &[type, number] : types)
        if (t == type) return number;
    TORCH_CHECK_VALUE(false, "lk: dlogits_dtype is ", dtype_name(t), "; it must be input's, float8_e5m2, or of float32 input "
                      "float16 or bfloat16");
}

// The loss; d becomes the gradients, for one upstream gradient, without one for 1.
static Tensor forward_backward(LossCall &c, const Tensor &logits, const Tensor &target, int64_t reduction, const Maybe &upstream,
                               const Tensor &d)
{
    Tensor loss = loss_like(target, logits, reduction);
    c.a.loss = loss.mutable_data_ptr<float>(), c.a.dlogits = d.mutable_data_ptr();
    c.a.dlogits_dtype = dlogits_type(d.scalar_type());
    if (has(upstream)) c.a.upstream = upstream->const_data_ptr<float>();
    LOSS_RUN(c, forward_backward_workspace_bytes, logits, &c.a, &c.a.workspace_bytes);
    const Workspace workspace(c.a.workspace_bytes);
    c.a.workspace = workspace.start;
    LOSS_RUN(c, forward_backward, logits, &c.a, c.stream);
    return loss;
}
static tuple<Tensor, Tensor> cross_entropy_forward_backward(const Tensor &logits, const Tensor &target,
                                                            const Maybe &class_weight, LK_LOSS_PARAMETERS,
                                                            const Maybe &upstream,
                                                            std::optional<at::ScalarType> dlogits_dtype)
{
    LossCall c(logits, target, class_weight, LK_LOSS_OPTIONS);
    const Tensor d = make_gradient(c.logits, dlogits_dtype.value_or(logits.scalar_type()), &c.a.dlogits_stride);
    return {forward_backward(c, logits, target, reduction, upstream, d), d};
}

static Tensor run_backward(LossCall &c, const Maybe &dloss, const Maybe &dlse, const Maybe &dentropy, const Tensor &logits,
                           const Maybe &lse, const Maybe &entropy, const Tensor &state, int64_t reduction)
{
    const Tensor saved = aligned(state);
    // No gradient of the loss is 0, but lk's NULL is 1.
    const Tensor up = has(dloss) ? dloss->contiguous() : at::zeros({}, logits.options().dtype(at::kFloat));
    const Maybe dl = packed(dlse), de = packed(dentropy), l = packed(lse), h = packed(entropy);
    Tensor d = make_gradient(c.logits, &c.a.dlogits_stride);
    set_state(c, saved, l);
    c.a.upstream = up.const_data_ptr<float>(), c.a.upstream_per_row = has(dloss) && !reduction;
    if (has(dl)) c.a.dlse = dl->const_data_ptr<float>();
    if (has(de)) c.a.dentropy = de->const_data_ptr<float>(), c.a.entropy = (float *)h->const_data_ptr();
    c.a.dlogits = d.mutable_data_ptr();
    if (c.split.parallel.vocab_total) {
        if (c.a.rows && c.a.vocab) RANK_RUN(backward, c, logits);
        return d;
    }
    LOSS_RUN(c, backward_workspace_bytes, logits, &c.a, &c.a.workspace_bytes);
    const Workspace workspace(c.a.workspace_bytes);
    c.a.workspace = workspace.start;
    LOSS_RUN(c, backward, logits, &c.a, c.stream);
    return d;
}

// lse and entropy: those of cross_entropy_stats. entropy is read with dentropy alone.
static Tensor cross_entropy_backward(const Maybe &dloss, const Maybe &dlse, const Maybe &dentropy, const Tensor &logits,
                                     const Tensor &target, const Maybe &class_weight, const Maybe &lse, const Maybe &entropy,
                                     const Tensor &state, LK_LOSS_PARAMETERS)
{
    LossCall c(logits, target, class_weight, LK_LOSS_OPTIONS);
    return run_backward(c, dloss, dlse, dentropy, logits, lse, entropy, state, reduction);
}

// loss, lse, z_loss, others, with stats entropy, argmax and statistics, and what backward needs besides. The results have the same
// bits on every rank. One all-gather, of 16, 32 or 40 bytes a row.
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
cross_entropy_parallel_forward(const Tensor &logits, const Tensor &target, const Maybe &class_weight, LK_LOSS_PARAMETERS,
                               LK_RANKS_PARAMETERS, bool stats, bool statistics)
{
    LossCall c(logits, target, class_weight, LK_LOSS_OPTIONS, LK_SHARDS);
    Tensor loss = loss_like(target, logits, reduction), z = loss_like(target, logits, reduction);
    Tensor lse = loss_like(target, logits, 0), others = loss_like(target, logits, 0), state = make_state(c, logits, 1);
    Statistics of_rows;
    set_state(c, state, lse);
    c.a.loss = loss.mutable_data_ptr<float>(), c.a.z_loss_out = z.mutable_data_ptr<float>();
    if (stats) of_rows.want(c.a, statistics, target.sizes(), logits);
    const Tensor states = make({slices * c.a.rows, c.a.statistics ? 10 : stats || label_smoothing > 0 ? 8 : 4}, logits, at::kFloat);
    const auto take = [&](int64_t first, int64_t count) {
        c.a.logits = element(c.logits.t, c.logits.data(), first), c.a.vocab = count, c.a.logits_stride = c.logits.distance();
    };
    run_slices(c.split, LK_SHARDS, states, take, [&] { RANK_RUN(forward, c, logits); });
    const Tensor all = gather_states(states, LK_RANKS);
    c.split.all_states = all.const_data_ptr(), c.split.states = others.mutable_data_ptr();
    RANK_RUN(finish, c, logits);
    of_rows.split();
    return {loss, lse, z, others, of_rows.entropy, of_rows.argmax, of_rows.statistics, state};
}

static Tensor cross_entropy_parallel_backward(const Maybe &dloss, const Maybe &dlse, const Maybe &dentropy, const Tensor &logits,
                                              const Tensor &target, const Maybe &class_weight, const Tensor &lse, const Maybe &entropy,
                                              const Tensor &others, const Tensor &state, LK_LOSS_PARAMETERS,
                                              LK_SHARDS_PARAMETERS)
{
    LossCall c(logits, target, class_weight, LK_LOSS_OPTIONS, LK_SHARDS);
    const Tensor o = aligned(others);
    c.split.states = (void *)o.const_data_ptr();
    return run_backward(c, dloss, dlse, dentropy, logits, lse, entropy, state, reduction);
}

// Outputs with a gradient: loss, and lse and entropy of cross_entropy_stats.
struct CrossEntropyBackward : Node {
    SavedVariable logits, target, weight, lse, entropy, others, state, divisor, factors;
    std::vector<int64_t> shards; // empty: the classes are not split
    int64_t rank = 0, slices = 1;
    bool stats;
    int64_t reduction, ignore_index;
    double label_smoothing, z_loss, softcap, logit_scale;
    bool zero_when_empty;
    variable_list apply(variable_list &&up) override
    {
        LK_OP(cross_entropy_backward);
        LK_OP(cross_entropy_parallel_backward);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!up[0].defined() && !(stats && (up[1].defined() || up[2].defined()))) return variable_list(1);
        const Tensor x = logits.unpack(), t = target.unpack(), w = weight.unpack(), s = state.unpack(), o = others.unpack();
        const Tensor l = stats ? lse.unpack(held(this)) : lse.unpack();
        const Tensor h = stats ? entropy.unpack(held(this)) : Tensor();
        const Maybe dlse = stats ? maybe(up[1]) : Maybe(), dentropy = stats ? maybe(up[2]) : Maybe();
        const Maybe denominator = maybe(divisor.unpack()), row_weight = maybe(factors.unpack());
        const Below below;
        if (!shards.empty())
            return once(*this, up, {cross_entropy_parallel_backward_op.call(maybe(up[0]), dlse, dentropy, x, t, maybe(w), l, maybe(h), o, s,
                                                                            LK_LOSS_OPTIONS, LK_SHARDS)}, "cross_entropy");
        return once(*this, up, {cross_entropy_backward_op.call(maybe(up[0]), dlse, dentropy, x, t, maybe(w), maybe(l), maybe(h), s,
                                                               LK_LOSS_OPTIONS)}, "cross_entropy");
    }
    void release_variables() override
    {
        logits.reset_data(), target.reset_data(), weight.reset_data(), lse.reset_data(), entropy.reset_data();
        others.reset_data(), state.reset_data(), divisor.reset_data(), factors.reset_data();
    }
    void keep(const Tensor &x, const Tensor &t, const Maybe &w, const Tensor &s, LK_LOSS_PARAMETERS)
    {
        logits = save(x), target = save(t), weight = save(w), state = save(s);
        this->reduction = reduction, this->ignore_index = ignore_index, this->label_smoothing = label_smoothing;
        this->z_loss = z_loss, this->softcap = softcap, this->logit_scale = logit_scale;
        this->zero_when_empty = zero_when_empty, divisor = save(denominator);
        factors = save(row_weight);
    }
};

// What in-place gradients ask of the logits. Where another node has saved them, PyTorch says so in backward, by their version.
static void check_inplace(const Tensor &logits, int64_t reduction, bool in_forward)
{
    TORCH_CHECK_VALUE(reduction != LK_REDUCTION_NONE, "lk: inplace needs a mean or a sum; the gradient of a loss for each row is "
                      "computed in backward");
    TORCH_CHECK_VALUE(in_forward, "lk: inplace in float16 needs grad_scale; without it the gradient is computed in backward");
    const bool leaf = logits.is_leaf() || (logits.is_view() && logits._base().is_leaf() && logits._base().requires_grad());
    TORCH_CHECK_VALUE(!leaf, "lk: inplace would overwrite a leaf that requires a gradient; compute the logits, or "
                      "leave inplace off");
    TORCH_CHECK_VALUE(logits.is_contiguous(), "lk: inplace needs contiguous logits; these have sizes ", logits.sizes(),
                      " and strides ", logits.strides());
}

// A reduced loss in eager mode computes its gradient in forward: one reading of the logits and one writing, and no logits to
// keep. A traced graph cannot scale in place, so there forward and backward are separate, as they are without a reduction, and
// in f16 unless the caller knows the upstream gradient. A gradient for 1 is too small there: what rounding takes off, a loss
// scale does not bring back.
Tensor cross_entropy(const Tensor &logits, const Tensor &target, const Maybe &class_weight, LK_LOSS_PARAMETERS,
                     const Maybe &grad_scale, bool inplace)
{
    LK_OP(cross_entropy_forward);
    LK_OP(cross_entropy_forward_backward);
    check_input(logits, "input"), check_constants(target, class_weight, denominator, row_weight);
    if (!wants_gradient(logits)) {
        const Below below;
        return std::get<0>(cross_entropy_forward_op.call(logits, target, class_weight, LK_LOSS_OPTIONS, false));
    }
    const bool in_forward = logits.scalar_type() != at::kHalf || has(grad_scale);
    inplace = inplace && !traced(logits);
    for (const Maybe &t : {Maybe(target), class_weight, denominator, row_weight, grad_scale}) inplace = inplace && !traced(t);
    if (inplace) {
        check_devices("cross_entropy", logits, target, class_weight, LK_LOSS_OPTIONS);
        check_inplace(logits, reduction, in_forward);
    }
    Tensor loss, saved;
    if (reduction != LK_REDUCTION_NONE && in_forward && !traced(logits)) {
        const Expected expected = expected_upstream(logits, grad_scale, Reduced::CROSS_ENTROPY);
        const auto node = make_node<LossBackward>(logits);
        {
            const Below below;
            const Maybe upstream = maybe(expected.upstream);
            if (inplace) {
                saved = logits.detach();
                LossCall c(logits, target, class_weight, LK_LOSS_OPTIONS);
                loss = forward_backward(c, logits, target, reduction, upstream, saved);
                torch::autograd::impl::bump_version(logits);
            } else {
                std::tie(loss, saved) =
                    cross_entropy_forward_backward_op.call(logits, target, class_weight, LK_LOSS_OPTIONS, upstream, std::nullopt);
            }
        }
        torch::autograd::set_history(loss, node);
        node->keep({saved}, expected), node->overwrites = inplace;
        node_is_made(node);
    } else {
        const auto node = make_node<CrossEntropyBackward>(logits);
        {
            const Below below;
            std::tie(loss, saved) = cross_entropy_forward_op.call(logits, target, class_weight, LK_LOSS_OPTIONS, true);
        }
        torch::autograd::set_history(loss, node);
        node->stats = false, node->keep(logits, target, class_weight, saved, LK_LOSS_OPTIONS);
        node_is_made(node);
    }
    return loss;
}

// Both as results, without autograd, which would cast a gradient of another type.
tuple<Tensor, Tensor> cross_entropy_with_grad(const Tensor &logits, const Tensor &target, const Maybe &class_weight,
                                              LK_LOSS_PARAMETERS, const Maybe &grad_scale,
                                              std::optional<at::ScalarType> dlogits_dtype)
{
    LK_OP(cross_entropy_forward_backward);
    check_input(logits, "input"), check_constants(target, class_weight, denominator, row_weight);
    if (dlogits_dtype) dlogits_type(*dlogits_dtype);
    const Tensor upstream = has(grad_scale) ? expected_upstream(logits, grad_scale, Reduced::CROSS_ENTROPY).upstream : Tensor();
    const Below below;
    return cross_entropy_forward_backward_op.call(logits, target, class_weight, LK_LOSS_OPTIONS, maybe(upstream), dlogits_dtype);
}

tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cross_entropy_stats(const Tensor &logits, const Tensor &target,
                                                                          const Maybe &class_weight, LK_LOSS_PARAMETERS,
                                                                          bool statistics)
{
    LK_OP(cross_entropy_stats_forward);
    check_input(logits, "input"), check_constants(target, class_weight, denominator, row_weight);
    const bool wanted = wants_gradient(logits);
    const auto node = wanted ? make_node<CrossEntropyBackward>(logits) : nullptr;
    Tensor loss, lse, z, entropy, argmax, more, state;
    {
        const Below below;
        std::tie(loss, lse, z, entropy, argmax, more, state) =
            cross_entropy_stats_forward_op.call(logits, target, class_weight, LK_LOSS_OPTIONS, statistics);
    }
    if (wanted) {
        for (const Tensor &out : {loss, lse, entropy}) torch::autograd::set_history(out, node);
        node->stats = true, node->lse = SavedVariable(lse, true), node->entropy = SavedVariable(entropy, true);
        node->keep(logits, target, class_weight, state, LK_LOSS_OPTIONS);
        node_is_made(node);
    }
    return {loss, lse, z, entropy, argmax, statistics ? more : Tensor()};
}

// The classes split over ranks. The gradient is computed in backward, which has no collective.
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cross_entropy_parallel(const Tensor &logits, const Tensor &target,
                                                                                    const Maybe &class_weight, LK_LOSS_PARAMETERS,
                                                                                    LK_RANKS_PARAMETERS, bool stats, bool statistics)
{
    LK_OP(cross_entropy_parallel_forward);
    check_input(logits, "input"), check_constants(target, class_weight, denominator, row_weight);
    const bool wanted = wants_gradient(logits);
    const auto node = wanted ? make_node<CrossEntropyBackward>(logits) : nullptr;
    Tensor loss, lse, z, others, entropy, argmax, more, state;
    {
        const Below below;
        std::tie(loss, lse, z, others, entropy, argmax, more, state) = cross_entropy_parallel_forward_op.call(
            logits, target, class_weight, LK_LOSS_OPTIONS, LK_RANKS, stats, statistics);
    }
    if (!statistics) more.reset();
    if (!stats) entropy.reset(), argmax.reset();
    if (!wanted) return {loss, lse, z, entropy, argmax, more};
    torch::autograd::set_history(loss, node);
    if (stats) torch::autograd::set_history(lse, node), torch::autograd::set_history(entropy, node);
    node->stats = stats, node->lse = SavedVariable(lse, stats), node->entropy = SavedVariable(entropy, stats);
    node->others = save(others), node->shards = shards.vec(), node->rank = rank, node->slices = slices;
    node->keep(logits, target, class_weight, state, LK_LOSS_OPTIONS);
    node_is_made(node);
    return {loss, lse, z, entropy, argmax, more};
}

// Returns what was set before. It is no node of a graph: torch.compile's programs look when they run.
static bool set_batch_invariant(bool on) { return batch_invariant_rows().exchange(on); }

#define INPUTS "Tensor logits, Tensor target, Tensor? class_weight, "
LK_OPS(m)
{
    m.def("set_batch_invariant(bool on) -> bool", &set_batch_invariant);
    user_op(m, "cross_entropy", "(" INPUTS LK_LOSS_SCHEMA ", Tensor? grad_scale, bool inplace) -> Tensor", &cross_entropy);
    user_op(m, "cross_entropy_with_grad",
            "(" INPUTS LK_LOSS_SCHEMA ", Tensor? grad_scale, ScalarType? dlogits_dtype) -> (Tensor, Tensor)",
            &cross_entropy_with_grad);
    user_op(m, "cross_entropy_stats",
            "(" INPUTS LK_LOSS_SCHEMA ", bool statistics) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
            &cross_entropy_stats);
    kernel(m, "cross_entropy_forward", "(" INPUTS LK_LOSS_SCHEMA ", bool keep) -> (Tensor, Tensor)", &cross_entropy_forward);
    kernel(m, "cross_entropy_stats_forward",
           "(" INPUTS LK_LOSS_SCHEMA ", bool statistics) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
           &cross_entropy_stats_forward);
    kernel(m, "cross_entropy_forward_backward",
           "(" INPUTS LK_LOSS_SCHEMA ", Tensor? upstream, ScalarType? dlogits_dtype) -> (Tensor, Tensor)", &cross_entropy_forward_backward);
    kernel(m, "cross_entropy_backward", "(Tensor? dloss, Tensor? dlse, Tensor? dentropy, " INPUTS
           "Tensor? lse, Tensor? entropy, Tensor state, " LK_LOSS_SCHEMA ") -> Tensor", &cross_entropy_backward);
    user_op(m, "cross_entropy_parallel",
            "(" INPUTS LK_LOSS_SCHEMA LK_RANKS_SCHEMA ", bool stats, bool statistics) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
            &cross_entropy_parallel);
    kernel(m, "cross_entropy_parallel_forward", "(" INPUTS LK_LOSS_SCHEMA LK_RANKS_SCHEMA ", bool stats, bool statistics) -> "
           "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", &cross_entropy_parallel_forward);
    kernel(m, "cross_entropy_parallel_backward", "(Tensor? dloss, Tensor? dlse, Tensor? dentropy, " INPUTS
           "Tensor lse, Tensor? entropy, Tensor others, Tensor state, " LK_LOSS_SCHEMA LK_SHARDS_SCHEMA ") -> Tensor",
           &cross_entropy_parallel_backward);
}

} // namespace lk_torch

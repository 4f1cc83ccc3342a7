// SPDX-License-Identifier: MIT
// kl, on one device or with the classes split over the ranks of a group: lk/kl.cuh and lk/kl_parallel.cuh.
#include "lk_torch.h"

#include "lk/kl_parallel.cuh"
LK_DECLARE_ALL(KL)
LK_DECLARE_ALL(KL_PARALLEL)

namespace lk_torch {

#define KL_PARAMETERS                                                                                                          \
    const Maybe &row_weight, int64_t divergence, double beta, double logit_scale, double teacher_scale, double softcap,        \
        double teacher_softcap
#define KL_OPTIONS row_weight, divergence, beta, logit_scale, teacher_scale, softcap, teacher_softcap

// The arguments that both directions have, and what keeps their memory.
struct Kl {
    Rows x, teacher;
    Tensor w;
    lk_kl_args a = {};
    Kl(const Tensor &input, const Tensor &other, KL_PARAMETERS) : x(input, "input"), teacher(other, "teacher")
    {
        check_input(input, "input");
        TORCH_CHECK_VALUE(input.sizes() == other.sizes(), "lk: teacher has shape ", other.sizes(), ", and input ", input.sizes());
        TORCH_CHECK_TYPE(input.scalar_type() == other.scalar_type(), "lk: teacher must be ", dtype_name(input.scalar_type()),
                         " as input is, not ", dtype_name(other.scalar_type()));
        TORCH_CHECK_VALUE((float)logit_scale != 0 && (float)teacher_scale != 0, "lk: a scale is 0; it must be above 0");
        fill_row_weight(a, input, row_weight, &w);
        a.logits = x.data(), a.teacher = teacher.data(), a.rows = x.rows, a.vocab = x.cols;
        a.logits_stride = x.stride, a.teacher_stride = teacher.stride;
        a.divergence = (int)divergence, a.beta = (float)beta;
        a.logit_scale = (float)logit_scale, a.teacher_scale = (float)teacher_scale;
        a.softcap = (float)softcap, a.teacher_softcap = (float)teacher_softcap;
        a.batch_invariant = batch_invariant_rows();
    }
    lk_kl_parallel_args split(LK_SHARDS_PARAMETERS, const Tensor &states)
    {
        lk_kl_parallel_args split = {};
        split.common = a, split.states = (void *)states.const_data_ptr();
        fill_slice(split, x.cols, "input", " classes", LK_SHARDS);
        return split;
    }
};

// loss and, if wanted, entropy
static tuple<Tensor, Tensor> kl_forward(const Tensor &x, const Tensor &teacher, KL_PARAMETERS, bool want_entropy)
{
    const Stream stream(x);
    Kl call(x, teacher, KL_OPTIONS);
    Tensor loss = make(x.sizes().slice(0, x.dim() - 1), x, at::kFloat), entropy;
    call.a.loss = loss.mutable_data_ptr<float>();
    if (want_entropy) entropy = make(loss.sizes(), x, at::kFloat), call.a.entropy = entropy.mutable_data_ptr<float>();
    if (call.a.rows) LK_RUN(lk_kl_forward, x, &call.a, stream);
    return {loss, entropy};
}

static Tensor kl_backward(const Tensor &dloss, const Tensor &x, const Tensor &teacher, KL_PARAMETERS)
{
    const Stream stream(x);
    Kl call(x, teacher, KL_OPTIONS);
    const Tensor up = dloss.contiguous();
    Tensor dx = make_gradient(call.x, &call.a.dlogits_stride);
    call.a.upstream = up.const_data_ptr<float>(), call.a.upstream_per_row = 1, call.a.dlogits = dx.mutable_data_ptr();
    if (call.a.rows) LK_RUN(lk_kl_backward, x, &call.a, stream);
    return dx;
}

// loss and, if wanted, entropy, the same bits on every rank, and the states of all classes, which backward needs. One all-gather, or
// two in jensen_shannon and total_variation, of 32 bytes a row.
static tuple<Tensor, Tensor, Tensor> kl_parallel_forward(const Tensor &x, const Tensor &teacher, KL_PARAMETERS, LK_RANKS_PARAMETERS,
                                                         bool want_entropy)
{
    const Stream stream(x);
    Kl call(x, teacher, KL_OPTIONS);
    Tensor loss = make(x.sizes().slice(0, x.dim() - 1), x, at::kFloat), merged = make({call.a.rows, 8}, x, at::kFloat), entropy, all;
    if (want_entropy) entropy = make(loss.sizes(), x, at::kFloat), call.a.entropy = entropy.mutable_data_ptr<float>();
    lk_kl_parallel_args a = call.split(LK_SHARDS, merged);
    if (!call.a.rows) return {loss, entropy, merged};
    const Tensor states = make({slices * call.a.rows, 8}, x, at::kFloat);
    const auto take = [&](int64_t first, int64_t count) {
        a.common.logits = element(call.x.t, call.x.data(), first), a.common.logits_stride = call.x.distance();
        a.common.teacher = element(call.teacher.t, call.teacher.data(), first), a.common.teacher_stride = call.teacher.distance();
        a.common.vocab = count;
    };
    const auto gather = [&] {
        all = gather_states(states, LK_RANKS);
        a.all_states = all.const_data_ptr();
    };
    run_slices(a, LK_SHARDS, states, take, [&] { LK_RUN(lk_kl_parallel_forward, x, &a, stream); });
    gather();
    if (LK_KL_HAS_BETWEEN(divergence)) {
        if (group.empty()) all = states.clone(), a.all_states = all.const_data_ptr(); // between reads all, and writes states
        run_slices(a, LK_SHARDS, states, take, [&] { LK_RUN(lk_kl_parallel_between, x, &a, stream); });
        gather();
    }
    a.states = merged.mutable_data_ptr(), a.common.loss = loss.mutable_data_ptr<float>();
    LK_RUN(lk_kl_parallel_finish, x, &a, stream);
    return {loss, entropy, merged};
}

static Tensor kl_parallel_backward(const Tensor &dloss, const Tensor &x, const Tensor &teacher, const Tensor &states,
                                   KL_PARAMETERS, LK_SHARDS_PARAMETERS)
{
    const Stream stream(x);
    Kl call(x, teacher, KL_OPTIONS);
    const Tensor up = dloss.contiguous(), saved = aligned(states);
    Tensor dx = make_gradient(call.x, &call.a.dlogits_stride);
    call.a.upstream = up.const_data_ptr<float>(), call.a.upstream_per_row = 1, call.a.dlogits = dx.mutable_data_ptr();
    const lk_kl_parallel_args a = call.split(LK_SHARDS, saved);
    if (call.a.rows) LK_RUN(lk_kl_parallel_backward, x, &a, stream);
    return dx;
}

struct KlBackward : Node {
    SavedVariable x, teacher, row_weight, states;
    std::vector<int64_t> shards; // empty: the classes are not split
    int64_t divergence, rank = 0, slices = 1;
    double beta, logit_scale, teacher_scale, softcap, teacher_softcap;
    variable_list apply(variable_list &&up) override
    {
        LK_OP(kl_backward);
        LK_OP(kl_parallel_backward);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!up[0].defined()) return variable_list(1);
        const Tensor input = x.unpack(), other = teacher.unpack(), of_all = states.unpack();
        const Maybe weight = maybe(row_weight.unpack());
        const Below below;
        if (!shards.empty())
            return once(*this, up, {kl_parallel_backward_op.call(up[0], input, other, of_all, weight, divergence, beta, logit_scale,
                                                                 teacher_scale, softcap, teacher_softcap, LK_SHARDS)}, "kl");
        return once(*this, up, {kl_backward_op.call(up[0], input, other, weight, divergence, beta, logit_scale, teacher_scale,
                                                    softcap, teacher_softcap)}, "kl");
    }
    void release_variables() override
    {
        x.reset_data(), teacher.reset_data(), row_weight.reset_data(), states.reset_data();
    }
    void keep(const Tensor &x, const Tensor &teacher, KL_PARAMETERS)
    {
        this->x = save(x), this->teacher = save(teacher), this->row_weight = save(row_weight);
        this->divergence = divergence, this->beta = beta, this->logit_scale = logit_scale, this->teacher_scale = teacher_scale;
        this->softcap = softcap, this->teacher_softcap = teacher_softcap;
    }
};

static void check_kl(const Tensor &x, const Tensor &teacher, const Maybe &row_weight)
{
    check_input(x, "input");
    TORCH_CHECK_VALUE(!wants_gradient(teacher), "lk: teacher requires a gradient, and gets none; detach it");
    TORCH_CHECK_VALUE(!wants_gradient(row_weight), "lk: row_weight requires a gradient, and gets none; detach it");
}

// loss, which has a gradient, and entropy, which has none and is undefined where it is not wanted
tuple<Tensor, Tensor> kl(const Tensor &x, const Tensor &teacher, KL_PARAMETERS, bool want_entropy)
{
    LK_OP(kl_forward);
    check_kl(x, teacher, row_weight);
    const bool wanted = wants_gradient(x);
    const auto node = wanted ? make_node<KlBackward>(x) : nullptr;
    Tensor loss, entropy;
    {
        const Below below;
        std::tie(loss, entropy) = kl_forward_op.call(x, teacher, KL_OPTIONS, want_entropy);
    }
    if (!wanted) return {loss, entropy};
    torch::autograd::set_history(loss, node);
    node->keep(x, teacher, KL_OPTIONS);
    node_is_made(node);
    return {loss, entropy};
}

// The classes split over ranks. Backward has no collective.
static tuple<Tensor, Tensor> kl_parallel(const Tensor &x, const Tensor &teacher, KL_PARAMETERS, LK_RANKS_PARAMETERS,
                                         bool want_entropy)
{
    LK_OP(kl_parallel_forward);
    check_kl(x, teacher, row_weight);
    const auto node = wants_gradient(x) ? make_node<KlBackward>(x) : nullptr;
    Tensor loss, entropy, states;
    {
        const Below below;
        std::tie(loss, entropy, states) = kl_parallel_forward_op.call(x, teacher, KL_OPTIONS, LK_RANKS, want_entropy);
    }
    if (!node) return {loss, entropy};
    torch::autograd::set_history(loss, node);
    node->shards = shards.vec(), node->rank = rank, node->slices = slices, node->states = save(states);
    node->keep(x, teacher, KL_OPTIONS);
    node_is_made(node);
    return {loss, entropy};
}

#define OPTIONS_SCHEMA                                                                                                         \
    "Tensor? row_weight, int divergence, float beta, float logit_scale, float teacher_scale, float softcap, "                  \
    "float teacher_softcap"
#define INPUTS "Tensor x, Tensor teacher, "
#define WANT_ENTROPY ", bool want_entropy"
LK_OPS(m)
{
    user_op(m, "kl", "(" INPUTS OPTIONS_SCHEMA WANT_ENTROPY ") -> (Tensor, Tensor)", &kl);
    kernel(m, "kl_forward", "(" INPUTS OPTIONS_SCHEMA WANT_ENTROPY ") -> (Tensor, Tensor)", &kl_forward);
    kernel(m, "kl_backward", "(Tensor dloss, " INPUTS OPTIONS_SCHEMA ") -> Tensor", &kl_backward);
    user_op(m, "kl_parallel", "(" INPUTS OPTIONS_SCHEMA LK_RANKS_SCHEMA WANT_ENTROPY ") -> (Tensor, Tensor)", &kl_parallel);
    kernel(m, "kl_parallel_forward", "(" INPUTS OPTIONS_SCHEMA LK_RANKS_SCHEMA WANT_ENTROPY ") -> (Tensor, Tensor, Tensor)",
           &kl_parallel_forward);
    kernel(m, "kl_parallel_backward", "(Tensor dloss, " INPUTS "Tensor states, " OPTIONS_SCHEMA LK_SHARDS_SCHEMA ") -> Tensor",
           &kl_parallel_backward);
}

} // namespace lk_torch

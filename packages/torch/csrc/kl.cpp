// SPDX-License-Identifier: MIT
// kl: lk/kl.cuh.
#include "lk_torch.h"

#include "lk/kl.cuh"
LK_DECLARE_ALL(KL)

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
        check_input(input, "input"), check_device(input, other, "teacher"), check_device(input, row_weight, "row_weight");
        TORCH_CHECK_VALUE(input.sizes() == other.sizes(), "lk: teacher has shape ", other.sizes(), ", and input ", input.sizes());
        TORCH_CHECK_TYPE(input.scalar_type() == other.scalar_type(), "lk: teacher must be ", c10::toString(input.scalar_type()),
                         " as input is, not ", c10::toString(other.scalar_type()));
        TORCH_CHECK_VALUE((float)logit_scale != 0 && (float)teacher_scale != 0, "lk: a scale is 0; it must be above 0");
        fill_row_weight(a, input, row_weight, &w);
        a.logits = x.data(), a.teacher = teacher.data(), a.rows = x.rows, a.vocab = x.cols;
        a.logits_stride = x.stride, a.teacher_stride = teacher.stride;
        a.divergence = (int)divergence, a.beta = (float)beta;
        a.logit_scale = (float)logit_scale, a.teacher_scale = (float)teacher_scale;
        a.softcap = (float)softcap, a.teacher_softcap = (float)teacher_softcap;
    }
};

static Tensor kl_forward(const Tensor &x, const Tensor &teacher, KL_PARAMETERS)
{
    const Stream stream(x);
    Kl call(x, teacher, KL_OPTIONS);
    Tensor loss = make(x.sizes().slice(0, x.dim() - 1), x, at::kFloat);
    call.a.loss = loss.mutable_data_ptr<float>();
    if (call.a.rows) LK_RUN(lk_kl_forward, x, &call.a, stream);
    return loss;
}

static Tensor kl_backward(const Tensor &dloss, const Tensor &x, const Tensor &teacher, KL_PARAMETERS)
{
    const Stream stream(x);
    Kl call(x, teacher, KL_OPTIONS);
    const Tensor up = dloss.contiguous();
    Tensor dx = make(x.sizes(), x);
    call.a.upstream = up.const_data_ptr<float>(), call.a.upstream_per_row = 1, call.a.dlogits = dx.mutable_data_ptr();
    if (call.a.rows) LK_RUN(lk_kl_backward, x, &call.a, stream);
    return dx;
}

struct KlBackward : Node {
    SavedVariable x, teacher, row_weight;
    int64_t divergence;
    double beta, logit_scale, teacher_scale, softcap, teacher_softcap;
    variable_list apply(variable_list &&up) override
    {
        LK_OP(kl_backward);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!up[0].defined()) return variable_list(1);
        const Tensor input = x.unpack(), other = teacher.unpack();
        const Maybe weight = maybe(row_weight.unpack());
        const Below below;
        return once({kl_backward_op.call(up[0], input, other, weight, divergence, beta, logit_scale, teacher_scale, softcap,
                                         teacher_softcap)}, "kl");
    }
    void release_variables() override { x.reset_data(), teacher.reset_data(), row_weight.reset_data(); }
};

Tensor kl(const Tensor &x, const Tensor &teacher, KL_PARAMETERS)
{
    LK_OP(kl_forward);
    check_input(x, "input");
    TORCH_CHECK_VALUE(!wants_gradient(teacher), "lk: teacher requires a gradient, and gets none; detach it");
    TORCH_CHECK_VALUE(!wants_gradient(row_weight), "lk: row_weight requires a gradient, and gets none; detach it");
    const bool wanted = wants_gradient(x);
    const auto node = wanted ? make_node<KlBackward>(x) : nullptr;
    Tensor loss;
    {
        const Below below;
        loss = kl_forward_op.call(x, teacher, KL_OPTIONS);
    }
    if (!wanted) return loss;
    torch::autograd::set_history(loss, node);
    node->x = save(x), node->teacher = save(teacher), node->row_weight = save(row_weight);
    node->divergence = divergence, node->beta = beta, node->logit_scale = logit_scale, node->teacher_scale = teacher_scale;
    node->softcap = softcap, node->teacher_softcap = teacher_softcap;
    node_is_made(node);
    return loss;
}

LK_OPS(m)
{
    const std::string options = "Tensor teacher, Tensor? row_weight, int divergence, float beta, float logit_scale, "
                                "float teacher_scale, float softcap, float teacher_softcap) -> Tensor";
    user_op(m, "kl", ("(Tensor x, " + options).c_str(), &kl);
    kernel(m, "kl_forward", ("(Tensor x, " + options).c_str(), &kl_forward);
    kernel(m, "kl_backward", ("(Tensor dloss, Tensor x, " + options).c_str(), &kl_backward);
}

} // namespace lk_torch

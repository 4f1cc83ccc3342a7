// SPDX-License-Identifier: MIT
// linear_topk: lk/linear_topk.cuh. It has no gradient. functional.py merges the results of ranks.
#include "lk_torch.h"

#include <algorithm>

#include <ATen/autocast_mode.h>

#include "lk/linear_topk.cuh"
LK_DECLARE_ALL(LINEAR_TOPK)

namespace lk_torch {

#define PARAMETERS                                                                                                             \
    const Tensor &x, const Tensor &weight, const Maybe &bias, const Maybe &seed, const Maybe &offset, int64_t k, double softcap, \
        double logit_scale, int64_t vocab_start, int64_t workspace_mib
#define ARGUMENTS x, weight, bias, seed, offset, k, softcap, logit_scale, vocab_start, workspace_mib

// seed or offset, one number per token
static Tensor numbers(const Maybe &of, const Tensor &x, const char *name)
{
    if (!has(of)) return Tensor();
    TORCH_CHECK_TYPE(of->scalar_type() == at::kLong, "lk: ", name, " is ", of->scalar_type(), "; it must be int64");
    TORCH_CHECK_VALUE(of->sizes() == x.sizes().slice(0, (size_t)x.dim() - 1), "lk: ", name, " has shape ", of->sizes(),
                      "; it must have that of input without its last dimension");
    TORCH_CHECK_VALUE(of->device() == x.device(), "lk: ", name, " is on ", of->device(), ", input on ", x.device());
    return of->contiguous();
}

// logp, ids, lse and score
static tuple<Tensor, Tensor, Tensor, Tensor> linear_topk_forward(PARAMETERS)
{
    check_input(x, "input");
    const Stream stream(x);
    const Rows rows = head_rows(x, "input");
    int unused;
    const Rows columns(weight_beside(weight, x, "linear_weight", &unused), "linear_weight");
    TORCH_CHECK_VALUE(weight.dim() == 2 && columns.cols == rows.cols, "lk: linear_weight has shape ", weight.sizes(),
                      "; it must be [classes, ", rows.cols, "]");
    Tensor b;
    if (has(bias)) {
        TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == columns.rows, "lk: linear_bias has shape ", bias->sizes(),
                          "; it must be [", columns.rows, "]");
        (void)type_beside(*bias, x.scalar_type(), "linear_bias");
        b = bias->to(x.scalar_type()).contiguous();
    }
    const Tensor seeds = numbers(seed, x, "seed"), offsets = numbers(offset, x, "offset");
    TORCH_CHECK_VALUE((float)logit_scale != 0, "lk: logit_scale is 0; it must be above 0");
    TORCH_CHECK_VALUE(workspace_mib >= 0, "lk: workspace_mib is ", workspace_mib, "; it must be at least 1");
    lk_linear_topk_args a = {};
    a.x = rows.data(), a.x_stride = rows.stride, a.tokens = rows.rows, a.hidden = rows.cols;
    a.weight = columns.data(), a.weight_stride = columns.stride, a.vocab = columns.rows;
    a.bias = b.defined() ? b.const_data_ptr() : nullptr;
    if (seeds.defined()) a.seed = (const uint64_t *)seeds.const_data_ptr();
    if (offsets.defined()) a.offset = (const uint64_t *)offsets.const_data_ptr();
    a.k = (int)std::clamp<int64_t>(k, INT32_MIN, INT32_MAX), a.vocab_start = vocab_start;
    a.softcap = (float)softcap, a.logit_scale = (float)logit_scale;
    a.tf32 = x.scalar_type() == at::kFloat && at::globalContext().allowTF32CuBLAS();
    lk_linear_topk_plan plan = {};
    const size_t budget = (size_t)workspace_mib << 20;
    // The plan comes before the results: it refuses a wrong k.
    if (budget) LK_RUN(lk_linear_topk_forward_plan, x, &a, SIZE_MAX, &plan);
    TORCH_CHECK_VALUE(budget >= plan.minimum_bytes, "lk: workspace_mib is ", workspace_mib, "; this call needs at least ",
                      (plan.minimum_bytes + ((size_t)1 << 20) - 1) >> 20);
    if (budget) LK_RUN(lk_linear_topk_forward_plan, x, &a, budget, &plan);
    else LK_RUN(lk_linear_topk_forward_workspace_bytes, x, &a, &plan.workspace_bytes);
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = k;
    const Tensor logp = make(sizes, x, at::kFloat), ids = make(sizes, x, at::kLong), score = make(sizes, x, at::kFloat);
    sizes.pop_back();
    const Tensor lse = make(sizes, x, at::kFloat);
    if (!a.tokens) return {logp, ids, lse, score};
    a.score = score.mutable_data_ptr<float>(), a.logp = logp.mutable_data_ptr<float>(), a.ids = ids.mutable_data_ptr(), a.lse = lse.mutable_data_ptr<float>();
    const Workspace workspace(a.workspace_bytes = plan.workspace_bytes);
    a.workspace = workspace.start;
    const Locked<lk_linear_topk_context> locked(x, lk_linear_topk_init);
    a.context = locked.context;
    LK_RUN(lk_linear_topk_forward, x, &a, stream);
    return {logp, ids, lse, score};
}

// A weight is mostly a Parameter, whose gradient nobody expects here. That of input somebody may.
tuple<Tensor, Tensor, Tensor, Tensor> linear_topk(PARAMETERS)
{
    LK_OP(linear_topk_forward);
    TORCH_CHECK_VALUE(!wants_gradient(x), "lk: input requires a gradient, and gets none; detach it");
    const Below below;
    return linear_topk_forward_op.call(ARGUMENTS);
}

// As F.linear: the matmul's tensors in autocast's type.
static tuple<Tensor, Tensor, Tensor, Tensor> linear_topk_autocast(PARAMETERS)
{
    LK_OP(linear_topk);
    const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKeySet(c10::DispatchKey::LK_AUTOCAST));
    const at::ScalarType type = at::autocast::get_autocast_dtype(LK_DEVICE_TYPE);
    const auto cast = [&](const auto &t) { return at::autocast::cached_cast(type, t, LK_DEVICE_TYPE); };
    return linear_topk_op.call(cast(x), cast(weight), cast(bias), seed, offset, k, softcap, logit_scale, vocab_start, workspace_mib);
}

#define SCHEMA                                                                                                                 \
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? seed, Tensor? offset, int k, float softcap, float logit_scale, "           \
    "int vocab_start, int workspace_mib) -> (Tensor, Tensor, Tensor, Tensor)"
LK_OPS(m)
{
    user_op(m, "linear_topk", SCHEMA, &linear_topk);
    kernel(m, "linear_topk_forward", SCHEMA, &linear_topk_forward);
    m.impl("linear_topk", torch::dispatch(c10::DispatchKey::LK_AUTOCAST, &linear_topk_autocast));
}

} // namespace lk_torch

// SPDX-License-Identifier: MIT
// rms_norm and add_rms_norm: lk/srms_norm.cuh.
#include "lk_torch.h"

#include "lk/srms_norm.cuh"
LK_DECLARE_ALL(SRMS_NORM)

namespace lk_torch {

// y, the sum x + residual if there is a residual, and rstd if it is kept for backward
static tuple<Tensor, Tensor, Tensor> rms_norm_forward(const Tensor &x, const Maybe &residual, const Maybe &weight, double eps,
                                                      double weight_offset, bool keep)
{
    check_input(x, "input"), check_device(x, residual, "residual"), check_device(x, weight, "weight");
    const Stream stream(x);
    const Rows rows(x, "input");
    lk_srms_norm_args a = {};
    Tensor y = make(x.sizes(), x), sum, rstd, w;
    std::optional<Rows> r;
    if (has(residual)) {
        TORCH_CHECK(residual->sizes() == x.sizes(), "lk: residual has shape ", residual->sizes(), " and input ", x.sizes());
        a.residual_dtype = type_beside(*residual, x.scalar_type(), "residual");
        r.emplace(*residual, "residual");
        sum = make(x.sizes(), *residual);
        a.residual = r->data(), a.residual_stride = r->stride, a.residual_out = sum.mutable_data_ptr();
    }
    if (has(weight)) {
        TORCH_CHECK(weight->dim() == 1 && weight->size(0) == rows.cols, "lk: weight has shape ", weight->sizes(),
                    "; it must be [", rows.cols, "]");
        a.weight_dtype = type_beside(*weight, x.scalar_type(), "weight");
        w = weight->contiguous();
        a.weight = w.const_data_ptr();
    }
    if (keep) {
        rstd = make(x.sizes().slice(0, x.dim() - 1), x, at::kFloat);
        a.rstd = rstd.mutable_data_ptr<float>();
    }
    a.x = rows.data(), a.x_stride = rows.stride, a.rows = rows.rows, a.cols = rows.cols, a.eps = (float)eps;
    a.weight_offset = (float)weight_offset;
    a.y = y.mutable_data_ptr();
    if (rows.cols) LK_RUN(lk_srms_norm_forward, x, &a, stream);
    return {y, sum, rstd};
}

// dx, dresidual where it has another type than dx, dweight. s is x, or the sum if there was a residual.
static tuple<Tensor, Tensor, Tensor> rms_norm_backward(const Tensor &dy, const Maybe &dsum, const Tensor &s, const Tensor &rstd,
                                                       const Maybe &weight, double weight_offset, bool is_sum, bool want_dx,
                                                       bool want_dweight)
{
    const Stream stream(s);
    const Rows rows(s, "input"), up(dy, "the gradient");
    const at::ScalarType type = dy.scalar_type();
    lk_srms_norm_args a = {};
    Tensor dx, dresidual, dweight, w, r = rstd.contiguous();
    std::optional<Rows> ds;
    if (is_sum) {
        a.residual_out = (void *)rows.data(), a.residual_out_stride = rows.stride;
        a.residual_dtype = type_beside(s, type, "residual");
    } else
        a.x = rows.data(), a.x_stride = rows.stride;
    if (has(dsum)) {
        ds.emplace(*dsum, "the gradient");
        a.dresidual_out = ds->data(), a.dresidual_out_stride = ds->stride;
    }
    if (want_dx) {
        dx = make(s.sizes(), s, type);
        a.dx = dx.mutable_data_ptr();
        if (is_sum && s.scalar_type() != type) {
            dresidual = make(s.sizes(), s);
            a.dresidual = dresidual.mutable_data_ptr();
        }
    }
    if (has(weight)) {
        w = weight->contiguous();
        a.weight = w.const_data_ptr(), a.weight_dtype = type_beside(w, type, "weight"), a.weight_offset = (float)weight_offset;
    }
    if (want_dweight) {
        dweight = make({rows.cols}, w);
        a.dweight = dweight.mutable_data_ptr(), a.dweight_dtype = a.weight_dtype;
    }
    a.dy = up.data(), a.dy_stride = up.stride, a.rows = rows.rows, a.cols = rows.cols, a.rstd = (float *)r.const_data_ptr();
    if (!rows.cols || !(want_dx || want_dweight)) return {dx, dresidual, dweight};
    if (want_dweight) LK_RUN(lk_srms_norm_backward_workspace_bytes, dy, &a, &a.workspace_bytes);
    const Workspace workspace(a.workspace_bytes);
    a.workspace = workspace.start;
    LK_RUN(lk_srms_norm_backward, dy, &a, stream);
    return {dx, dresidual, dweight};
}

// Edges: x, weight, residual. Outputs: y, and the sum.
struct RmsNormBackward : Node {
    SavedVariable s, rstd, weight;
    bool is_sum;
    at::ScalarType x_type;
    double weight_offset;
    variable_list apply(variable_list &&up) override
    {
        LK_OP(rms_norm_backward);
        const std::lock_guard<std::mutex> lock(mutex_);
        const bool want_x = task_should_compute_output(0), want_weight = task_should_compute_output(1);
        const bool want_residual = is_sum && task_should_compute_output(2);
        const Tensor dsum = is_sum ? up[1] : Tensor();
        variable_list d(is_sum ? 3 : 2);
        if (!up[0].defined()) {
            if (want_x && dsum.defined()) d[0] = dsum.to(x_type);
            if (want_residual) d[2] = dsum;
        } else {
            const Tensor saved = is_sum ? s.unpack(shared_from_this()) : s.unpack(), r = rstd.unpack(), w = weight.unpack();
            const Below below;
            Tensor dresidual;
            std::tie(d[0], dresidual, d[1]) = rms_norm_backward_op.call(up[0], maybe(dsum), saved, r, maybe(w),
                                                                        weight_offset, is_sum, want_x || want_residual,
                                                                        want_weight);
            if (want_residual) d[2] = dresidual.defined() ? dresidual : d[0];
            if (!want_x) d[0] = Tensor();
        }
        return once(std::move(d), "rms_norm");
    }
    void release_variables() override { s.reset_data(), rstd.reset_data(), weight.reset_data(); }
};

static tuple<Tensor, Tensor> norm(const Tensor &x, const Maybe &residual, const c10::SymInt &cols, const Maybe &weight,
                                  std::optional<double> eps, double weight_offset)
{
    LK_OP(rms_norm_forward);
    check_input(x, "input");
    TORCH_CHECK(x.dim() >= 1 && x.sym_size(-1) == cols, "lk: normalized_shape ends in ", cols, ", but input has shape ",
                x.sym_sizes());
    const double e = eps.value_or(std::numeric_limits<float>::epsilon()); // as in F.rms_norm, for every type of x
    if (!wants_gradient(x, residual, weight)) {
        const Below below;
        auto [y, sum, rstd] = rms_norm_forward_op.call(x, residual, weight, e, weight_offset, false);
        return {y, sum};
    }
    const auto node = residual ? make_node<RmsNormBackward>(x, weight, residual) : make_node<RmsNormBackward>(x, weight);
    Tensor y, sum, rstd;
    {
        const Below below;
        std::tie(y, sum, rstd) = rms_norm_forward_op.call(x, residual, weight, e, weight_offset, true);
    }
    node->is_sum = sum.defined(), node->x_type = x.scalar_type(), node->weight_offset = weight_offset;
    torch::autograd::set_history(y, node);
    if (node->is_sum) torch::autograd::set_history(sum, node);
    node->s = node->is_sum ? SavedVariable(sum, true) : save(x);
    node->rstd = save(rstd), node->weight = save(weight);
    return {y, sum};
}
Tensor rms_norm(const Tensor &x, c10::SymInt cols, const Maybe &weight, std::optional<double> eps, double weight_offset)
{
    return std::get<0>(norm(x, {}, cols, weight, eps, weight_offset));
}
tuple<Tensor, Tensor> add_rms_norm(const Tensor &x, const Tensor &residual, c10::SymInt cols, const Maybe &weight,
                                   std::optional<double> eps, double weight_offset)
{
    return norm(x, residual, cols, weight, eps, weight_offset);
}

TORCH_LIBRARY_FRAGMENT(lk, m)
{
    user_op(m, "rms_norm", "(Tensor x, SymInt cols, Tensor? weight, float? eps, float weight_offset) -> Tensor", &rms_norm);
    user_op(m, "add_rms_norm", "(Tensor x, Tensor residual, SymInt cols, Tensor? weight, float? eps, "
            "float weight_offset) -> (Tensor, Tensor)", &add_rms_norm);
    kernel(m, "rms_norm_forward",
           "(Tensor x, Tensor? residual, Tensor? weight, float eps, float weight_offset, "
           "bool keep) -> (Tensor, Tensor, Tensor)", &rms_norm_forward);
    kernel(m, "rms_norm_backward", "(Tensor dy, Tensor? dsum, Tensor s, Tensor rstd, Tensor? weight, "
           "float weight_offset, bool is_sum, bool want_dx, bool want_dweight) -> (Tensor, Tensor, Tensor)",
           &rms_norm_backward);
}

} // namespace lk_torch

// SPDX-License-Identifier: MIT
// md_lrpe_cosine: lk/md_lrpe_cosine.cuh.
#include "lk_torch.h"

#include "lk/md_lrpe_cosine.cuh"
LK_DECLARE_ALL(MD_LRPE_COSINE)

namespace lk_torch {

// lk takes strides of batch, head and token, 0 means packed, and rows must not overlap. Any other tensor is copied. So is a large
// one with rows beside multiples of 16 bytes: for its sake lk would read and write all tensors element by element.
static Tensor strided(const Tensor &x)
{
    bool fits = x.stride(3) == 1 || x.size(3) == 1;
    for (int i = 0; i < 3 && fits; i++) fits = x.size(i) <= 1 || x.stride(i) >= x.size(3);
    if (!fits) return x.contiguous();
    const int64_t vec = 16 / (int64_t)x.element_size();
    bool wide = (uintptr_t)x.const_data_ptr() % 16 == 0;
    for (int i = 0; i < 3 && wide; i++) wide = x.size(i) <= 1 || x.stride(i) % vec == 0;
    return !wide && x.size(3) % vec == 0 && worth_a_copy(x) ? x.clone(at::MemoryFormat::Contiguous) : x;
}
static int64_t stride(const Tensor &x, int i) { return x.size(i) > 1 ? x.stride(i) : 0; }

// moved: an offset on the device, int32, which is added to the other. Returns what keeps its memory.
static Maybe fill(lk_md_lrpe_cosine_args &a, const Tensor &x, const Tensor &theta, at::IntArrayRef shape, int64_t prefix,
                  at::IntArrayRef offset, const Maybe &moved, int64_t activation)
{
    TORCH_CHECK_VALUE(shape.size() >= 1 && shape.size() <= 8, "lk: shape has ", shape.size(), " axes; it must have 1 to 8");
    int64_t grid = 1;
    TORCH_CHECK_VALUE(offset.empty() || offset.size() == shape.size(), "lk: offset has ", offset.size(),
                      " numbers, but shape has ", shape.size());
    for (size_t i = 0; i < shape.size(); i++) grid *= a.shape[i] = shape[i];
    for (size_t i = 0; i < offset.size(); i++) a.offset[i] = offset[i];
    TORCH_CHECK_VALUE(prefix + grid == x.size(2), "lk: prefix and shape hold ", prefix, " + ", grid,
                      " tokens, but x has ", x.size(2));
    a.batch = x.size(0), a.heads = x.size(1), a.dim = x.size(3), a.prefix = prefix, a.axes = (int)shape.size();
    // One column of theta serves all features of an axis.
    a.theta_heads = theta.size(0), a.theta_features = theta.size(1);
    a.e = theta.size(1) == 1 ? (a.dim + a.axes - 1) / a.axes : theta.size(1);
    a.theta_dtype = type_beside(theta, x.scalar_type(), "theta"), a.activation = (int)activation;
    a.x_batch_stride = stride(x, 0), a.x_head_stride = stride(x, 1), a.x_token_stride = stride(x, 2);
    a.x = x.const_data_ptr();
    if (!has(moved)) return {};
    TORCH_CHECK_VALUE(moved->dim() == 1 && moved->size(0) == (int64_t)shape.size(), "lk: offset has shape ", moved->sizes(),
                      ", but shape has ", shape.size());
    TORCH_CHECK_TYPE(moved->scalar_type() == at::kInt, "lk: offset must be int32 or int64, not ",
                     dtype_name(moved->scalar_type()));
    const Maybe kept = packed(moved);
    a.offset_device = kept->const_data_ptr<int32_t>();
    return kept;
}

static Tensor md_lrpe_cosine_forward(const Tensor &x, const Tensor &theta, at::IntArrayRef shape, int64_t prefix,
                                     at::IntArrayRef offset, const Maybe &offset_device, int64_t activation)
{
    check_input(x, "x");
    TORCH_CHECK_VALUE(x.dim() == 4, "lk: x must be [batch, heads, tokens, dim]; it has shape ", x.sizes());
    TORCH_CHECK_VALUE(theta.dim() == 2 && (theta.size(0) == x.size(1) || theta.size(0) == 1), "lk: theta must be [heads = ",
                x.size(1), " or 1, features or 1]; it has shape ", theta.sizes());
    const Stream stream(x);
    const Tensor in = strided(x), th = theta.contiguous();
    lk_md_lrpe_cosine_args a = {};
    const Maybe kept = fill(a, in, th, shape, prefix, offset, offset_device, activation);
    Tensor y = make({x.size(0), x.size(1), x.size(2), 2 * x.size(3)}, x);
    a.theta = th.const_data_ptr(), a.y = y.mutable_data_ptr();
    if (!y.numel()) return y;
    LK_RUN(lk_md_lrpe_cosine_forward_workspace_bytes, x, &a, &a.workspace_bytes);
    const Workspace workspace(a.workspace_bytes);
    a.workspace = workspace.start;
    LK_RUN(lk_md_lrpe_cosine_forward, x, &a, stream);
    return y;
}

static tuple<Tensor, Tensor> md_lrpe_cosine_backward(const Tensor &dy, const Tensor &x, const Tensor &theta,
                                                     at::IntArrayRef shape, int64_t prefix, at::IntArrayRef offset,
                                                     const Maybe &offset_device, int64_t activation, bool want_dx,
                                                     bool want_dtheta)
{
    const Stream stream(x);
    const Tensor in = strided(x), up = strided(dy), th = theta.contiguous();
    lk_md_lrpe_cosine_args a = {};
    const Maybe kept = fill(a, in, th, shape, prefix, offset, offset_device, activation);
    Tensor dx, dtheta;
    if (want_dx) dx = make(x.sizes(), x);
    if (want_dtheta) dtheta = x.numel() ? make(theta.sizes(), x, at::kFloat) : at::zeros_like(theta, at::kFloat);
    if (x.numel() && (want_dx || want_dtheta)) {
        a.theta = th.const_data_ptr(), a.dy = up.const_data_ptr();
        a.dy_batch_stride = stride(up, 0), a.dy_head_stride = stride(up, 1), a.dy_token_stride = stride(up, 2);
        if (want_dx) a.dx = dx.mutable_data_ptr();
        if (want_dtheta) a.dtheta = dtheta.mutable_data_ptr<float>();
        LK_RUN(lk_md_lrpe_cosine_backward_workspace_bytes, x, &a, &a.workspace_bytes);
        const Workspace workspace(a.workspace_bytes);
        a.workspace = workspace.start;
        LK_RUN(lk_md_lrpe_cosine_backward, x, &a, stream);
    }
    if (want_dtheta) dtheta = dtheta.to(theta.scalar_type());
    return {dx, dtheta};
}

struct MdLrpeCosineBackward : Node {
    SavedVariable x, theta, moved;
    std::vector<c10::SymInt> shape, offset;
    c10::SymInt prefix;
    int64_t activation;
    variable_list apply(variable_list &&up) override
    {
        LK_OP_AS(md_lrpe_cosine_backward, tuple<Tensor, Tensor>(const Tensor &, const Tensor &, const Tensor &,
                                                                c10::SymIntArrayRef, c10::SymInt, c10::SymIntArrayRef,
                                                                const Maybe &, int64_t, bool, bool));
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!up[0].defined()) return variable_list(2);
        const Tensor input = x.unpack(), th = theta.unpack(), by = moved.unpack();
        const Below below;
        auto [dx, dtheta] = md_lrpe_cosine_backward_op.call(up[0], input, th, shape, prefix, offset, maybe(by), activation,
                                                            task_should_compute_output(0), task_should_compute_output(1));
        return once(*this, up, {dx, dtheta}, "md_lrpe_cosine");
    }
    void release_variables() override { x.reset_data(), theta.reset_data(), moved.reset_data(); }
};

Tensor md_lrpe_cosine(const Tensor &x, const Tensor &theta, c10::SymIntArrayRef shape, c10::SymInt prefix,
                      c10::SymIntArrayRef offset, const Maybe &offset_device, int64_t activation)
{
    LK_OP_AS(md_lrpe_cosine_forward, Tensor(const Tensor &, const Tensor &, c10::SymIntArrayRef, c10::SymInt, c10::SymIntArrayRef,
                                            const Maybe &, int64_t));
    check_input(x, "x");
    const bool wanted = wants_gradient(x, theta);
    const auto node = wanted ? make_node<MdLrpeCosineBackward>(x, theta) : nullptr;
    Tensor y;
    {
        const Below below;
        y = md_lrpe_cosine_forward_op.call(x, theta, shape, prefix, offset, offset_device, activation);
    }
    if (!wanted) return y;
    torch::autograd::set_history(y, node);
    node->x = save(x), node->theta = save(theta), node->moved = save(offset_device);
    node->shape = shape.vec(), node->prefix = std::move(prefix), node->offset = offset.vec(), node->activation = activation;
    node_is_made(node);
    return y;
}

#define OPTIONS "SymInt[] shape, SymInt prefix, SymInt[] offset, Tensor? offset_device, int activation"
LK_OPS(m)
{
    user_op(m, "md_lrpe_cosine", "(Tensor x, Tensor theta, " OPTIONS ") -> Tensor", &md_lrpe_cosine);
    kernel(m, "md_lrpe_cosine_forward", "(Tensor x, Tensor theta, " OPTIONS ") -> Tensor", &md_lrpe_cosine_forward);
    kernel(m, "md_lrpe_cosine_backward", "(Tensor dy, Tensor x, Tensor theta, " OPTIONS ", bool want_dx, bool want_dtheta) -> "
           "(Tensor, Tensor)", &md_lrpe_cosine_backward);
}

} // namespace lk_torch

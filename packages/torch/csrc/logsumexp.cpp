// SPDX-License-Identifier: MIT
// logsumexp: lk/logsumexp.cuh.
#include "lk_torch.h"

#include "lk/logsumexp.cuh"
LK_DECLARE_ALL(LOGSUMEXP)

namespace lk_torch {

// x as [outer, cols, inner] with lk's strides; copied where it is no such thing. Of logits[:, :-1] each sequence is one, and gets a
// call where that takes less time than a copy.
struct Box {
    Tensor x;
    std::optional<Rows> rows; // of x, where dim is its last one, and there is one call
    int64_t calls = 1, apart = 0; // from the x of a call to that of the next, in elements
    lk_logsumexp_args a = {};
    Box(const Tensor &input, int64_t dim, double scale) : x(input)
    {
        TORCH_CHECK_VALUE((float)scale != 0, "lk: scale is 0; it must be another finite value");
        a.outer = a.cols = a.inner = 1, a.scale = (float)scale;
        for (int64_t i = 0; i < x.dim(); i++) (i < dim ? a.outer : i == dim ? a.cols : a.inner) *= x.size(i);
        if (dim == x.dim() - 1 && by_sequence(x, &a.outer_stride)) {
            calls = x.size(0), apart = x.stride(0), a.outer /= calls;
        } else if (x.dim() && dim == x.dim() - 1) {
            rows.emplace(x, "input");
            x = rows->t, a.outer_stride = rows->stride;
        } else {
            x = x.contiguous();
            // Neighbouring rows are read as vectors where each of a.inner starts on 16 bytes.
            const bool off = (uintptr_t)x.const_data_ptr() % 16 != 0 && a.inner * (int64_t)x.element_size() % 16 == 0;
            if (off && worth_a_copy(x)) x = x.clone();
        }
        a.x = x.const_data_ptr();
    }
    // Whether calls for each x[i] take less time than a copy of x, and give the same bits. A copy of 4 MiB takes as long as the
    // launch of a call, 2 us, at an H200's 4 TB/s; that is computed, and no call was timed on either side of it. The bits are the
    // same where all rows lie as packed ones do modulo 16 bytes, which the gradient's vectors need, too, and where lk takes the same
    // kernel. Of rows of more than 16 KiB it has another one for fewer than two per SM; 400 are enough for any GPU that there is.
    static bool by_sequence(const Tensor &x, int64_t *stride)
    {
        if (x.dim() < 3 || x.size(0) < 2 || x.size(0) > 64 || !x.numel() || row_stride(x.sizes(), x.strides(), stride) ||
            !row_stride(x.sizes().slice(1), x.strides().slice(1), stride)) return false;
        const int64_t size = (int64_t)x.element_size(), cols = x.size(-1), elements = x.numel() / x.size(0);
        const int64_t more = *stride ? *stride - cols : 0, apart = x.stride(0) - elements; // than of packed rows
        const bool alike = (uintptr_t)x.const_data_ptr() % 16 == 0 && more * size % 16 == 0 && apart * size % 16 == 0;
        return alike && elements * size >= (int64_t)4 << 20 && (cols * size <= 16384 || elements / cols >= 400);
    }
    // The arguments of the next call. All but x are packed.
    void step()
    {
        const int64_t size = (int64_t)x.element_size();
        const auto move = [](auto &p, int64_t bytes) {
            if (p) p = (std::decay_t<decltype(p)>)((uintptr_t)p + bytes);
        };
        move(a.x, apart * size), move(a.dx, a.outer * a.cols * size);
        move(a.lse, a.outer * 4), move(a.lse_low, a.outer * 4), move(a.lse_rounded, a.outer * size);
        move(a.dlse, a.outer * 4), move(a.dlse_rounded, a.outer * size);
    }
};

// The result, and what backward needs besides: lse_low, and lse itself where the result is lse rounded to a type of 16 bits.
static tuple<Tensor, Tensor> logsumexp_forward(const Tensor &x, int64_t dim, bool keepdim, double scale, at::ScalarType type,
                                               bool keep)
{
    check_input(x, "input");
    const Stream stream(x);
    Box box(x, dim, scale);
    lk_logsumexp_args &a = box.a;
    c10::SmallVector<int64_t, 6> sizes(x.sizes());
    if (x.dim()) keepdim ? (void)(sizes[dim] = 1) : (void)sizes.erase(sizes.begin() + dim);
    Tensor out = make(sizes, x, type), state;
    const int64_t n = out.numel();
    if (keep) {
        state = make({type == at::kFloat ? n : 2 * n}, x, at::kFloat);
        a.lse_low = state.mutable_data_ptr<float>();
    }
    if (type == at::kFloat)
        a.lse = out.mutable_data_ptr<float>();
    else
        a.lse_rounded = out.mutable_data_ptr(), a.lse = keep ? a.lse_low + n : nullptr;
    for (int64_t i = 0; n && i < box.calls; i++, box.step()) LK_RUN(lk_logsumexp_forward, x, &a, stream);
    return {out, state};
}

static Tensor logsumexp_backward(const Tensor &dout, const Tensor &x, const Tensor &out, const Tensor &state, int64_t dim,
                                 double scale)
{
    const Stream stream(x);
    Box box(x, dim, scale);
    lk_logsumexp_args &a = box.a;
    const Tensor up = dout.contiguous(), lse = out.contiguous(), low = state.contiguous();
    Tensor dx = box.rows ? make_gradient(*box.rows, &a.dx_outer_stride) : make(x.sizes(), x);
    if (!x.numel()) return dx;
    a.lse_low = (float *)low.const_data_ptr();
    a.lse = out.scalar_type() == at::kFloat ? (float *)lse.const_data_ptr() : a.lse_low + out.numel();
    if (up.scalar_type() == at::kFloat) a.dlse = up.const_data_ptr<float>();
    else a.dlse_rounded = up.const_data_ptr(); // the result's type, which is x's
    a.dx = dx.mutable_data_ptr();
    for (int64_t i = 0; i < box.calls; i++, box.step()) LK_RUN(lk_logsumexp_backward, x, &a, stream);
    return dx;
}

struct LogsumexpBackward : Node {
    SavedVariable x, out, state;
    int64_t dim;
    double scale;
    variable_list apply(variable_list &&up) override
    {
        LK_OP(logsumexp_backward);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!up[0].defined()) return variable_list(1);
        const Tensor input = x.unpack(), result = out.unpack(held(this)), s = state.unpack();
        const Below below;
        return once(*this, up, {logsumexp_backward_op.call(up[0], input, result, s, dim, scale)}, "logsumexp");
    }
    void release_variables() override { x.reset_data(), out.reset_data(), state.reset_data(); }
};

Tensor logsumexp(const Tensor &x, int64_t dim, bool keepdim, double scale, std::optional<at::ScalarType> dtype)
{
    LK_OP(logsumexp_forward);
    check_input(x, "input");
    const at::ScalarType type = dtype.value_or(x.scalar_type());
    TORCH_CHECK_TYPE(type == x.scalar_type() || type == at::kFloat, "lk: dtype must be ", dtype_name(x.scalar_type()),
                     x.scalar_type() == at::kFloat ? "" : " or float32", ", not ", dtype_name(type));
    dim = at::maybe_wrap_dim(dim, x.dim());
    const bool wanted = wants_gradient(x);
    const auto node = wanted ? make_node<LogsumexpBackward>(x) : nullptr;
    Tensor out, state;
    {
        const Below below;
        std::tie(out, state) = logsumexp_forward_op.call(x, dim, keepdim, scale, type, wanted);
    }
    if (!wanted) return out;
    torch::autograd::set_history(out, node);
    node->x = save(x), node->out = SavedVariable(out, true), node->state = save(state);
    node->dim = dim, node->scale = scale;
    node_is_made(node);
    return out;
}

LK_OPS(m)
{
    user_op(m, "logsumexp", "(Tensor x, int dim, bool keepdim, float scale, ScalarType? dtype) -> Tensor", &logsumexp);
    kernel(m, "logsumexp_forward",
           "(Tensor x, int dim, bool keepdim, float scale, ScalarType dtype, bool keep) -> (Tensor, Tensor)",
           &logsumexp_forward);
    kernel(m, "logsumexp_backward", "(Tensor dout, Tensor x, Tensor out, Tensor state, int dim, float scale) -> Tensor",
           &logsumexp_backward);
}

} // namespace lk_torch

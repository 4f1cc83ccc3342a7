// SPDX-License-Identifier: MIT
// rms_norm and add_rms_norm: lk/srms_norm.cuh; with a gate: lk/srms_norm_gated.cuh; with a result of 8 bits: lk/srms_norm_fp8.cuh.
#include "lk_torch.h"

#include "lk/srms_norm_fp8.cuh"
#include "lk/srms_norm_gated.cuh"
LK_DECLARE_ALL(SRMS_NORM)
LK_DECLARE_ALL(SRMS_NORM_FP8)
LK_DECLARE_ALL(SRMS_NORM_GATED)

namespace lk_torch {

// The kernels read and write vectors of 16 bytes where the rows of all tensors have the same addresses modulo 16 bytes, and go
// element by element where those of one do not. What a call makes is packed, so rows that do not lie as packed ones are copied.
// whole: the kernel has vectors for rows of whole vectors alone.
struct NormRows : Rows {
    NormRows(const Tensor &x, const char *name, bool whole = false) : Rows(x, name)
    {
        if (!lies_as_packed() && !(whole && cols % vec()) && worth_a_copy(t)) pack();
    }
};

// weight and bias: [cols], or [groups, cols] with a row for every groups-th row of x. Both have one type. w and b keep the
// memory of copies.
static void fill_affine(lk_srms_norm_args &a, const Tensor &x, const Maybe &weight, const Maybe &bias, int64_t cols, Tensor *w,
                        Tensor *b)
{
    const std::tuple<const Maybe &, const char *, Tensor *> both[] = {{weight, "weight", w}, {bias, "bias", b}};
    for (const auto &[t, name, copy] : both) {
        if (!has(t)) continue;
        TORCH_CHECK_VALUE((t->dim() == 1 || (t->dim() == 2 && t->size(0))) && t->size(-1) == cols, "lk: ", name,
                          " has shape ", t->sizes(), "; it must be [", cols, "] or [groups, ", cols, "]");
        a.groups = t->dim() == 2 ? t->size(0) : 1;
        a.weight_dtype = type_beside(*t, x.scalar_type(), name);
        *copy = t->contiguous();
        // Vectors of it lie on 16 bytes where its rows do. It is read for each row of x.
        const bool off = (uintptr_t)copy->const_data_ptr() % 16 != 0 && cols * (int64_t)copy->element_size() % 16 == 0;
        if (off && worth_a_copy(x)) *copy = copy->clone();
    }
    if (has(weight)) a.weight = w->const_data_ptr();
    if (has(bias)) a.bias = b->const_data_ptr();
    if (!has(weight) || !has(bias)) return;
    TORCH_CHECK_VALUE(weight->sizes() == bias->sizes(), "lk: bias has shape ", bias->sizes(), ", and weight ", weight->sizes());
    TORCH_CHECK_TYPE(weight->scalar_type() == bias->scalar_type(), "lk: bias is ", dtype_name(bias->scalar_type()),
                     ", and weight ", dtype_name(weight->scalar_type()), "; they must have one type");
}

// The residual of x, and the sum, which becomes a new tensor. r keeps the memory of a copy.
static void fill_residual(lk_srms_norm_args &a, const Tensor &x, const Maybe &residual, std::optional<NormRows> *r, Tensor *sum,
                          bool whole = false)
{
    if (!has(residual)) return;
    TORCH_CHECK_VALUE(residual->sizes() == x.sizes(), "lk: residual has shape ", residual->sizes(), " and input ", x.sizes());
    a.residual_dtype = type_beside(*residual, x.scalar_type(), "residual");
    r->emplace(*residual, "residual", whole);
    *sum = make(x.sizes(), *residual);
    a.residual = (*r)->data(), a.residual_stride = (*r)->stride, a.residual_out = sum->mutable_data_ptr();
}

// y, the sum x + residual if there is a residual, and rstd if it is kept for backward
static tuple<Tensor, Tensor, Tensor> rms_norm_forward(const Tensor &x, const Maybe &residual, const Maybe &weight,
                                                      const Maybe &bias, double eps, double weight_offset, bool round_sum,
                                                      bool keep)
{
    check_input(x, "input");
    const Stream stream(x);
    const NormRows rows(x, "input");
    lk_srms_norm_args a = {};
    Tensor y = make(x.sizes(), x), sum, rstd, w, b;
    std::optional<NormRows> r;
    fill_residual(a, x, residual, &r, &sum);
    fill_affine(a, x, weight, bias, rows.cols, &w, &b);
    if (keep) {
        rstd = make(x.sizes().slice(0, x.dim() - 1), x, at::kFloat);
        a.rstd = rstd.mutable_data_ptr<float>();
    }
    a.x = rows.data(), a.x_stride = rows.stride, a.rows = rows.rows, a.cols = rows.cols, a.eps = (float)eps;
    a.weight_offset = (float)weight_offset, a.batch_invariant = batch_invariant_rows(), a.round_sum = round_sum;
    a.y = y.mutable_data_ptr();
    if (rows.cols) LK_RUN(lk_srms_norm_forward, x, &a, stream);
    return {y, sum, rstd};
}

// Scales [rows, blocks], those of one block next to one another, as products of 8 bits want them; MX: those of one row.
static Tensor make_scales(const Tensor &x, int64_t rows, int64_t cols, int64_t scaling, int64_t *stride, int64_t *block_stride)
{
    const bool mx = scaling == LK_SRMS_NORM_FP8_MX;
    const int64_t per = mx ? 32 : 128, blocks = scaling == LK_SRMS_NORM_FP8_ROW ? 1 : (cols + per - 1) / per;
    *stride = mx ? blocks : 1, *block_stride = mx ? 1 : rows;
    return mx ? make({rows, blocks}, x, at::kFloat8_e8m0fnu) : make({blocks, rows}, x, at::kFloat).t();
}

// q, the scales unless scaling is TENSOR, amax if wanted, q_transposed and its scales if wanted, the sum, rstd
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
rms_norm_fp8_forward(const Tensor &x, const Maybe &residual, const Maybe &weight, double eps, double weight_offset,
                     int64_t scaling, bool e5m2, bool power_of_two, int64_t scale_rounding, const Maybe &scale, bool want_amax,
                     bool want_transposed, bool round_sum, bool keep)
{
    check_input(x, "input");
    const Stream stream(x);
    const NormRows rows(x, "input", true);
    const bool tensor = scaling == LK_SRMS_NORM_FP8_TENSOR;
    const at::ScalarType type = e5m2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
    lk_srms_norm_fp8_args args = {};
    lk_srms_norm_args &a = args.common;
    Tensor q = make(x.sizes(), x, type), scales, amax, turned, turned_scales, sum, rstd, w, b;
    std::optional<NormRows> r;
    fill_residual(a, x, residual, &r, &sum, true);
    fill_affine(a, x, weight, {}, rows.cols, &w, &b);
    if (keep) {
        rstd = make(x.sizes().slice(0, x.dim() - 1), x, at::kFloat);
        a.rstd = rstd.mutable_data_ptr<float>();
    }
    if (has(scale)) {
        TORCH_CHECK_TYPE(scale->scalar_type() == at::kFloat, "lk: scale must be float32, not ",
                         dtype_name(scale->scalar_type()));
        TORCH_CHECK_VALUE(scale->numel() == 1, "lk: scale has shape ", scale->sizes(), "; it must be one number");
        args.tensor_scale = scale->const_data_ptr<float>();
    }
    if (want_amax) amax = make({}, x, at::kFloat).zero_(), args.amax = amax.mutable_data_ptr<float>();
    if (!tensor) {
        scales = make_scales(x, rows.rows, rows.cols, scaling, &args.scale_stride, &args.scale_block_stride);
        args.scale = scales.mutable_data_ptr();
        std::vector<int64_t> shape = x.sizes().vec();
        shape.back() = scales.size(1);
        scales = scales.view(shape);
    }
    if (want_transposed) {
        turned = make({rows.cols, rows.rows}, x, type), args.q_transposed = turned.mutable_data_ptr();
        if (!tensor) {
            turned_scales = make_scales(x, rows.cols, rows.rows, scaling, &args.transposed_scale_stride,
                                        &args.transposed_block_stride);
            args.transposed_scale = turned_scales.mutable_data_ptr();
        }
    }
    a.x = rows.data(), a.x_stride = rows.stride, a.rows = rows.rows, a.cols = rows.cols, a.eps = (float)eps;
    a.weight_offset = (float)weight_offset, a.round_sum = round_sum;
    args.q = q.mutable_data_ptr(), args.scaling = (int)scaling, args.format = e5m2, args.power_of_two = power_of_two;
    args.scale_rounding = (int)scale_rounding;
    if (rows.cols) LK_RUN(lk_srms_norm_fp8_forward, x, &args, stream);
    return {q, scales, amax, turned, turned_scales, sum, rstd};
}

// dx, dresidual where it has another type than dx, dweight, dbias. s is x, or the sum if there was a residual. A bias is given
// where its gradient is wanted.
static tuple<Tensor, Tensor, Tensor, Tensor> rms_norm_backward(const Tensor &dy, const Maybe &dsum, const Tensor &s,
                                                               const Tensor &rstd, const Maybe &weight, const Maybe &bias,
                                                               double weight_offset, bool is_sum, bool want_dx,
                                                               bool want_dweight)
{
    const Stream stream(s);
    const NormRows rows(s, "input"), up(dy, "the gradient");
    const at::ScalarType type = dy.scalar_type();
    lk_srms_norm_args a = {};
    Tensor dx, dresidual, dweight, dbias, w, b, r = rstd.contiguous();
    std::optional<NormRows> ds;
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
    fill_affine(a, dy, weight, bias, rows.cols, &w, &b);
    a.weight_offset = (float)weight_offset, a.dweight_dtype = a.weight_dtype;
    if (want_dweight) dweight = make(w.sizes(), w), a.dweight = dweight.mutable_data_ptr();
    if (has(bias)) dbias = make(b.sizes(), b), a.dbias = dbias.mutable_data_ptr();
    a.dy = up.data(), a.dy_stride = up.stride, a.rows = rows.rows, a.cols = rows.cols, a.rstd = (float *)r.const_data_ptr();
    if (!rows.cols || !(want_dx || want_dweight || has(bias))) return {dx, dresidual, dweight, dbias};
    if (want_dweight || has(bias)) LK_RUN(lk_srms_norm_backward_workspace_bytes, dy, &a, &a.workspace_bytes);
    const Workspace workspace(a.workspace_bytes);
    a.workspace = workspace.start;
    LK_RUN(lk_srms_norm_backward, dy, &a, stream);
    return {dx, dresidual, dweight, dbias};
}

// Edges: x, weight, bias, residual. Outputs: y, and the sum.
struct RmsNormBackward : Node {
    SavedVariable s, rstd, weight, bias;
    bool is_sum;
    at::ScalarType x_type;
    double weight_offset;
    variable_list apply(variable_list &&up) override
    {
        LK_OP(rms_norm_backward);
        const std::lock_guard<std::mutex> lock(mutex_);
        const bool want_x = task_should_compute_output(0), want_weight = task_should_compute_output(1);
        const bool want_bias = task_should_compute_output(2), want_residual = is_sum && task_should_compute_output(3);
        const Tensor dsum = is_sum ? up[1] : Tensor();
        variable_list d(is_sum ? 4 : 3);
        if (!up[0].defined()) {
            if (want_x && dsum.defined()) d[0] = dsum.to(x_type);
            if (want_residual) d[3] = dsum;
        } else {
            const Tensor saved = is_sum ? s.unpack(held(this)) : s.unpack(), r = rstd.unpack(), w = weight.unpack();
            const Tensor b = bias.unpack();
            const Below below;
            Tensor dresidual;
            std::tie(d[0], dresidual, d[1], d[2]) =
                rms_norm_backward_op.call(up[0], maybe(dsum), saved, r, maybe(w), want_bias ? maybe(b) : Maybe(), weight_offset,
                                          is_sum, want_x || want_residual, want_weight);
            if (want_residual) d[3] = saved.scalar_type() != x_type ? dresidual : d[0];
        }
        return once(*this, up, std::move(d), "rms_norm");
    }
    void release_variables() override { s.reset_data(), rstd.reset_data(), weight.reset_data(), bias.reset_data(); }
};

static tuple<Tensor, Tensor> norm(const Tensor &x, const Maybe &residual, const c10::SymInt &cols, const Maybe &weight,
                                  const Maybe &bias, std::optional<double> eps, double weight_offset, bool round_sum)
{
    LK_OP(rms_norm_forward);
    check_input(x, "input");
    TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) == cols, "lk: normalized_shape ends in ", cols, ", but input has shape ",
                x.sym_sizes());
    const double e = eps.value_or(std::numeric_limits<float>::epsilon()); // as in F.rms_norm, for every type of x
    if (!wants_gradient(x, residual, weight, bias)) {
        const Below below;
        auto [y, sum, rstd] = rms_norm_forward_op.call(x, residual, weight, bias, e, weight_offset, round_sum, false);
        return {y, sum};
    }
    const auto node = residual ? make_node<RmsNormBackward>(x, weight, bias, residual)
                               : make_node<RmsNormBackward>(x, weight, bias);
    Tensor y, sum, rstd;
    {
        const Below below;
        std::tie(y, sum, rstd) = rms_norm_forward_op.call(x, residual, weight, bias, e, weight_offset, round_sum, true);
    }
    node->is_sum = has(residual), node->x_type = x.scalar_type(), node->weight_offset = weight_offset;
    torch::autograd::set_history(y, node);
    if (node->is_sum) torch::autograd::set_history(sum, node);
    node->s = node->is_sum ? SavedVariable(sum, true) : save(x);
    node->rstd = save(rstd), node->weight = save(weight), node->bias = save(bias);
    node_is_made(node);
    return {y, sum};
}
Tensor rms_norm(const Tensor &x, c10::SymInt cols, const Maybe &weight, const Maybe &bias, std::optional<double> eps,
                double weight_offset)
{
    return std::get<0>(norm(x, {}, cols, weight, bias, eps, weight_offset, false));
}
tuple<Tensor, Tensor> add_rms_norm(const Tensor &x, const Tensor &residual, c10::SymInt cols, const Maybe &weight,
                                   const Maybe &bias, std::optional<double> eps, double weight_offset, bool round_sum)
{
    return norm(x, residual, cols, weight, bias, eps, weight_offset, round_sum);
}

// With a gate. y, and rstd if it is kept for backward
static void check_gate(const Tensor &x, const Tensor &gate)
{
    TORCH_CHECK_VALUE(gate.sizes() == x.sizes(), "lk: gate has shape ", gate.sizes(), " and input ", x.sizes());
    TORCH_CHECK_TYPE(gate.scalar_type() == x.scalar_type(), "lk: gate is ", dtype_name(gate.scalar_type()), "; it must be ",
                     dtype_name(x.scalar_type()), ", as input is");
}
static tuple<Tensor, Tensor> rms_norm_gated_forward(const Tensor &x, const Tensor &gate, const Maybe &weight, double eps,
                                                    double weight_offset, bool gate_first, bool keep)
{
    check_input(x, "input"), check_gate(x, gate);
    const Stream stream(x);
    const NormRows rows(x, "input"), gates(gate, "gate");
    lk_srms_norm_gated_args args = {};
    lk_srms_norm_args &a = args.common;
    Tensor y = make(x.sizes(), x), rstd, w, b;
    fill_affine(a, x, weight, {}, rows.cols, &w, &b);
    if (keep) {
        rstd = make(x.sizes().slice(0, x.dim() - 1), x, at::kFloat);
        a.rstd = rstd.mutable_data_ptr<float>();
    }
    a.x = rows.data(), a.x_stride = rows.stride, a.rows = rows.rows, a.cols = rows.cols, a.eps = (float)eps;
    a.weight_offset = (float)weight_offset, a.y = y.mutable_data_ptr(), a.batch_invariant = batch_invariant_rows();
    args.gate = gates.data(), args.gate_stride = gates.stride, args.gate_first = gate_first;
    if (rows.cols) LK_RUN(lk_srms_norm_gated_forward, x, &args, stream);
    return {y, rstd};
}

// dx, dgate, dweight
static tuple<Tensor, Tensor, Tensor> rms_norm_gated_backward(const Tensor &dy, const Tensor &x, const Tensor &gate,
                                                             const Tensor &rstd, const Maybe &weight, double weight_offset,
                                                             bool gate_first, bool want_dx, bool want_dgate, bool want_dweight)
{
    const Stream stream(x);
    const NormRows rows(x, "input"), gates(gate, "gate"), up(dy, "the gradient");
    lk_srms_norm_gated_args args = {};
    lk_srms_norm_args &a = args.common;
    Tensor dx, dgate, dweight, w, b, r = rstd.contiguous();
    if (want_dx) dx = make(x.sizes(), x), a.dx = dx.mutable_data_ptr();
    if (want_dgate) dgate = make(x.sizes(), x), args.dgate = dgate.mutable_data_ptr();
    fill_affine(a, dy, weight, {}, rows.cols, &w, &b);
    a.weight_offset = (float)weight_offset, a.dweight_dtype = a.weight_dtype;
    if (want_dweight) dweight = make(w.sizes(), w), a.dweight = dweight.mutable_data_ptr();
    a.x = rows.data(), a.x_stride = rows.stride, a.dy = up.data(), a.dy_stride = up.stride;
    a.rows = rows.rows, a.cols = rows.cols, a.rstd = (float *)r.const_data_ptr();
    args.gate = gates.data(), args.gate_stride = gates.stride, args.gate_first = gate_first;
    if (!rows.cols || !(want_dx || want_dgate || want_dweight)) return {dx, dgate, dweight};
    LK_RUN(lk_srms_norm_gated_backward_workspace_bytes, dy, &args, &a.workspace_bytes);
    const Workspace workspace(a.workspace_bytes);
    a.workspace = workspace.start;
    LK_RUN(lk_srms_norm_gated_backward, dy, &args, stream);
    return {dx, dgate, dweight};
}

// Edges: x, gate, weight.
struct RmsNormGatedBackward : Node {
    SavedVariable x, gate, rstd, weight;
    double weight_offset;
    bool gate_first;
    variable_list apply(variable_list &&up) override
    {
        LK_OP(rms_norm_gated_backward);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!up[0].defined()) return variable_list(3);
        const Tensor in = x.unpack(), g = gate.unpack(), r = rstd.unpack(), w = weight.unpack();
        const Below below;
        auto [dx, dgate, dweight] = rms_norm_gated_backward_op.call(up[0], in, g, r, maybe(w), weight_offset, gate_first,
                                                                    task_should_compute_output(0), task_should_compute_output(1),
                                                                    task_should_compute_output(2));
        return once(*this, up, {dx, dgate, dweight}, "rms_norm");
    }
    void release_variables() override { x.reset_data(), gate.reset_data(), rstd.reset_data(), weight.reset_data(); }
};

Tensor rms_norm_gated(const Tensor &x, const Tensor &gate, c10::SymInt cols, const Maybe &weight, std::optional<double> eps,
                      double weight_offset, bool gate_first)
{
    LK_OP(rms_norm_gated_forward);
    check_input(x, "input");
    TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) == cols, "lk: normalized_shape ends in ", cols, ", but input has shape ",
                      x.sym_sizes());
    const double e = eps.value_or(std::numeric_limits<float>::epsilon());
    const bool wanted = wants_gradient(x, gate, weight);
    const auto node = wanted ? make_node<RmsNormGatedBackward>(x, gate, weight.value_or(Tensor())) : nullptr;
    Tensor y, rstd;
    {
        const Below below;
        std::tie(y, rstd) = rms_norm_gated_forward_op.call(x, gate, weight, e, weight_offset, gate_first, wanted);
    }
    if (!wanted) return y;
    node->weight_offset = weight_offset, node->gate_first = gate_first;
    torch::autograd::set_history(y, node);
    node->x = save(x), node->gate = save(gate), node->rstd = save(rstd), node->weight = save(weight);
    node_is_made(node);
    return y;
}

// With a result of 8 bits: q, the scales, amax, q_transposed, its scales, the sum; what was not asked for is undefined. The
// gradient of q is one of y, straight through the rounding.
tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
rms_norm_fp8(const Tensor &x, const Maybe &residual, c10::SymInt cols, const Maybe &weight, std::optional<double> eps,
             double weight_offset, int64_t scaling, bool e5m2, bool power_of_two, int64_t scale_rounding, const Maybe &scale,
             bool want_amax, bool want_transposed, bool round_sum)
{
    LK_OP(rms_norm_fp8_forward);
    check_input(x, "input");
    TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) == cols, "lk: normalized_shape ends in ", cols, ", but input has shape ",
                      x.sym_sizes());
    TORCH_CHECK_VALUE(!wants_gradient(scale), "lk: scale requires a gradient, and gets none; detach it");
    const double e = eps.value_or(std::numeric_limits<float>::epsilon());
    const bool keep = wants_gradient(x, residual, weight);
    decltype(make_node<RmsNormBackward>(x, weight, Maybe())) node;
    if (keep && residual) node = make_node<RmsNormBackward>(x, weight, Maybe(), residual);
    else if (keep) node = make_node<RmsNormBackward>(x, weight, Maybe());
    const auto [q, scales, amax, turned, turned_scales, sum, rstd] = [&] {
        const Below below;
        return rms_norm_fp8_forward_op.call(x, residual, weight, e, weight_offset, scaling, e5m2, power_of_two, scale_rounding,
                                            scale, want_amax, want_transposed, round_sum, keep);
    }();
    const bool blocks = scaling != LK_SRMS_NORM_FP8_TENSOR;
    const auto asked = [](bool is, const Tensor &t) { return is ? t : Tensor(); };
    const tuple out(q, asked(blocks, scales), asked(want_amax, amax), asked(want_transposed, turned),
                    asked(want_transposed && blocks, turned_scales), asked(has(residual), sum));
    if (!keep) return out;
    node->is_sum = has(residual), node->x_type = x.scalar_type(), node->weight_offset = weight_offset;
    /* The engine rounds a gradient to the type of what it belongs to. That of q is to have x's type, so the node says x. */
    const uint32_t number = node->add_input_metadata(x);
    torch::autograd::impl::set_gradient_edge(q, {held(node.get()), number});
    if (node->is_sum) torch::autograd::set_history(sum, node);
    node->s = node->is_sum ? SavedVariable(sum, true) : save(x);
    node->rstd = save(rstd), node->weight = save(weight), node->bias = save(Tensor());
    node_is_made(node);
    return out;
}

LK_OPS(m)
{
    user_op(m, "rms_norm_fp8", "(Tensor x, Tensor? residual, SymInt cols, Tensor? weight, float? eps, float weight_offset, "
            "int scaling, bool e5m2, bool power_of_two, int scale_rounding, Tensor? scale, bool want_amax, "
            "bool want_transposed, bool round_sum) -> "
            "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", &rms_norm_fp8);
    kernel(m, "rms_norm_fp8_forward", "(Tensor x, Tensor? residual, Tensor? weight, float eps, float weight_offset, int scaling, "
           "bool e5m2, bool power_of_two, int scale_rounding, Tensor? scale, bool want_amax, bool want_transposed, bool round_sum, "
           "bool keep) -> "
           "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", &rms_norm_fp8_forward);
    user_op(m, "rms_norm", "(Tensor x, SymInt cols, Tensor? weight, Tensor? bias, float? eps, float weight_offset) -> Tensor",
            &rms_norm);
    user_op(m, "add_rms_norm", "(Tensor x, Tensor residual, SymInt cols, Tensor? weight, Tensor? bias, float? eps, "
            "float weight_offset, bool round_sum) -> (Tensor, Tensor)", &add_rms_norm);
    user_op(m, "rms_norm_gated", "(Tensor x, Tensor gate, SymInt cols, Tensor? weight, float? eps, float weight_offset, "
            "bool gate_first) -> Tensor", &rms_norm_gated);
    kernel(m, "rms_norm_gated_forward",
           "(Tensor x, Tensor gate, Tensor? weight, float eps, float weight_offset, bool gate_first, "
           "bool keep) -> (Tensor, Tensor)",
           &rms_norm_gated_forward);
    kernel(m, "rms_norm_gated_backward", "(Tensor dy, Tensor x, Tensor gate, Tensor rstd, Tensor? weight, float weight_offset, "
           "bool gate_first, bool want_dx, bool want_dgate, bool want_dweight) -> (Tensor, Tensor, Tensor)",
           &rms_norm_gated_backward);
    kernel(m, "rms_norm_forward",
           "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, float weight_offset, "
           "bool round_sum, bool keep) -> (Tensor, Tensor, Tensor)", &rms_norm_forward);
    kernel(m, "rms_norm_backward", "(Tensor dy, Tensor? dsum, Tensor s, Tensor rstd, Tensor? weight, "
           "Tensor? bias, float weight_offset, bool is_sum, bool want_dx, bool want_dweight) -> "
           "(Tensor, Tensor, Tensor, Tensor)",
           &rms_norm_backward);
}

} // namespace lk_torch

// SPDX-License-Identifier: MIT
// glu: lk/glu.cuh.
#include "lk_torch.h"

#include "lk/glu.cuh"
LK_DECLARE_ALL(GLU)

namespace lk_torch {

// What both calls get. Rows at one distance are read where they lie, as those of both halves of a tensor do. Without up a row
// of gate has both: one after the other, or in turns.
struct Glu {
    Rows gate;
    std::optional<Rows> up;
    Tensor weight; // the memory of a copy of row_weight
    bool halves;
    lk_glu_args a = {};
    Glu(const Tensor &gate_, const Maybe &up_, const Maybe &row_weight, int64_t activation, double alpha,
        std::optional<double> limit, double up_offset, bool interleaved)
        : gate(gate_, "gate"), halves(!has(up_) && !interleaved)
    {
        TORCH_CHECK_VALUE((float)alpha != 0, "lk: alpha is 0; it must be another finite value");
        TORCH_CHECK_VALUE(!limit || (float)*limit > 0, "lk: limit is ", *limit, "; it must be above 0, or None");
        if (has(up_)) {
            TORCH_CHECK_VALUE(!interleaved, "lk: with interleaved gate has both, and up must be None");
            TORCH_CHECK_VALUE(up_->sizes() == gate_.sizes(), "lk: up has shape ", up_->sizes(), " and gate ", gate_.sizes());
            TORCH_CHECK_TYPE(up_->scalar_type() == gate_.scalar_type(), "lk: up is ", dtype_name(up_->scalar_type()),
                             ", and gate ", dtype_name(gate_.scalar_type()), "; they must have one type");
            up.emplace(*up_, "up");
            a.up = up->data(), a.up_stride = up->stride;
        } else
            TORCH_CHECK_VALUE(gate.cols % 2 == 0, "lk: gate has shape ", gate_.sizes(),
                              "; without up it has both in its last dimension, whose size must be even");
        fill_row_weight(a, gate_, row_weight, &weight);
        a.gate = gate.data(), a.gate_stride = gate.stride, a.rows = gate.rows, a.cols = has(up_) ? gate.cols : gate.cols / 2;
        if (halves) a.up = second(a.gate), a.gate_stride = a.up_stride = gate.distance();
        a.activation = (int)activation, a.interleaved = interleaved, a.alpha = alpha == 1 ? 0.0f : (float)alpha;
        a.limit = (float)limit.value_or(0), a.up_offset = (float)up_offset;
    }
    // Where the second half of the first row begins.
    template <class Pointer> Pointer second(Pointer first) const
    {
        return (Pointer)((uintptr_t)first + (uintptr_t)a.cols * gate.t.element_size());
    }
};

static Tensor glu_forward(const Tensor &gate, const Maybe &up, const Maybe &row_weight, int64_t activation, double alpha,
                          std::optional<double> limit, double up_offset, bool interleaved)
{
    check_input(gate, "gate");
    const Stream stream(gate);
    Glu call(gate, up, row_weight, activation, alpha, limit, up_offset, interleaved);
    c10::SmallVector<int64_t, 6> sizes(gate.sizes());
    sizes.back() = call.a.cols;
    Tensor y = make(sizes, gate);
    call.a.y = y.mutable_data_ptr();
    if (y.numel()) LK_RUN(lk_glu_forward, gate, &call.a, stream);
    return y;
}

// dgate, which has both without up, dup and drow_weight.
static tuple<Tensor, Tensor, Tensor> glu_backward(const Tensor &dy, const Tensor &gate, const Maybe &up,
                                                  const Maybe &row_weight, int64_t activation, double alpha,
                                                  std::optional<double> limit, double up_offset, bool interleaved,
                                                  bool want_gate, bool want_up, bool want_row_weight)
{
    const Stream stream(gate);
    Glu call(gate, up, row_weight, activation, alpha, limit, up_offset, interleaved);
    lk_glu_args &a = call.a;
    const Rows upstream(dy, "the gradient");
    Tensor dgate, dup, dweight;
    if (want_gate) dgate = make(gate.sizes(), gate), a.dgate = dgate.mutable_data_ptr();
    if (want_gate && call.halves) a.dup = call.second(a.dgate), a.dgate_stride = a.dup_stride = 2 * a.cols;
    if (want_up) dup = make(up->sizes(), gate), a.dup = dup.mutable_data_ptr();
    if (want_row_weight) {
        dweight = make(row_weight->sizes(), gate, at::kFloat);
        if (!dy.numel()) dweight.zero_();
        a.drow_weight = dweight.mutable_data_ptr<float>();
    }
    a.dy = upstream.data(), a.dy_stride = upstream.stride;
    if (dy.numel() && (want_gate || want_up || want_row_weight)) LK_RUN(lk_glu_backward, gate, &a, stream);
    if (want_row_weight) dweight = dweight.to(row_weight->scalar_type());
    return {dgate, dup, dweight};
}

// Edges: gate, up, row_weight.
struct GluBackward : Node {
    SavedVariable gate, up, row_weight;
    int64_t activation;
    double alpha, up_offset;
    std::optional<double> limit;
    bool interleaved;
    variable_list apply(variable_list &&upstream) override
    {
        LK_OP(glu_backward);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!upstream[0].defined()) return variable_list(3);
        const Tensor g = gate.unpack(), u = up.unpack(), r = row_weight.unpack();
        const Below below;
        auto [dgate, dup, dweight] = glu_backward_op.call(
            upstream[0], g, maybe(u), maybe(r), activation, alpha, limit, up_offset, interleaved, task_should_compute_output(0),
            u.defined() && task_should_compute_output(1), r.defined() && task_should_compute_output(2));
        return once(*this, upstream, {dgate, dup, dweight}, "glu");
    }
    void release_variables() override { gate.reset_data(), up.reset_data(), row_weight.reset_data(); }
};

Tensor glu(const Tensor &gate, const Maybe &up, const Maybe &row_weight, int64_t activation, double alpha,
           std::optional<double> limit, double up_offset, bool interleaved)
{
    LK_OP(glu_forward);
    check_input(gate, "gate");
    const bool wanted = wants_gradient(gate, up, row_weight);
    const auto node = wanted ? make_node<GluBackward>(gate, up, row_weight) : nullptr;
    Tensor y;
    {
        const Below below;
        y = glu_forward_op.call(gate, up, row_weight, activation, alpha, limit, up_offset, interleaved);
    }
    if (!wanted) return y;
    torch::autograd::set_history(y, node);
    node->gate = save(gate), node->up = save(up), node->row_weight = save(row_weight);
    node->activation = activation, node->alpha = alpha, node->limit = limit, node->up_offset = up_offset;
    node->interleaved = interleaved;
    node_is_made(node);
    return y;
}

#define OPTIONS                                                                                                                \
    "Tensor gate, Tensor? up, Tensor? row_weight, int activation, float alpha, float? limit, float up_offset, "                \
    "bool interleaved"
LK_OPS(m)
{
    user_op(m, "glu", "(" OPTIONS ") -> Tensor", &glu);
    kernel(m, "glu_forward", "(" OPTIONS ") -> Tensor", &glu_forward);
    kernel(m, "glu_backward", "(Tensor dy, " OPTIONS ", bool want_gate, bool want_up, bool want_row_weight) -> "
           "(Tensor, Tensor, Tensor)", &glu_backward);
}

} // namespace lk_torch

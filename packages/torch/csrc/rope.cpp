// SPDX-License-Identifier: MIT
// rope: lk/rope.cuh.
#include "lk_torch.h"

#include "lk/rope.cuh"
LK_DECLARE_ALL(ROPE)

namespace lk_torch {

// [batch, tokens, heads, dim] or [tokens, heads, dim]; with heads_first heads are before tokens. lk takes any strides but 0,
// which means packed there. So an expanded tensor is copied, and so is one whose last dimension is not contiguous.
struct Heads {
    Tensor t;
    int64_t batch = 1, tokens, heads, dim;
    bool heads_first;
    Heads(const Tensor &x, const char *name, bool heads_first_) : t(x), heads_first(heads_first_)
    {
        TORCH_CHECK_VALUE(x.dim() == 3 || x.dim() == 4, "lk: ", name, " must be ",
                          heads_first ? "[batch, heads, tokens, dim] or [heads, tokens, dim]"
                                      : "[batch, tokens, heads, dim] or [tokens, heads, dim]",
                          "; it has shape ", x.sizes());
        if (x.dim() == 4) batch = x.size(0);
        tokens = x.size(heads_first ? -2 : -3), heads = x.size(heads_first ? -3 : -2), dim = x.size(-1);
        bool fits = x.stride(-1) == 1 || dim <= 1;
        for (int64_t i = 0; i < x.dim() - 1 && fits; i++) fits = x.size(i) <= 1 || x.stride(i) > 0;
        if (!fits) t = x.contiguous();
    }
    const void *data() const { return t.const_data_ptr(); }
};
static void fill_strides(int64_t (&stride)[3], const Tensor &x, bool heads_first)
{
    const int64_t dims[3] = {-4, heads_first ? -2 : -3, heads_first ? -3 : -2};
    for (int i = x.dim() == 3; i < 3; i++) stride[i] = x.size(dims[i]) > 1 ? x.stride(dims[i]) : 0;
}

// A tensor of x's shape whose dimensions lie in memory in the order of x's, without gaps. _fake.py says the same.
static Tensor make_in_order(const Tensor &x)
{
    const int64_t n = x.dim();
    std::vector<int64_t> order, sizes, back(n);
    for (int64_t i = 0; i < n; i++) {
        int64_t at = i;
        if (i < n - 1)
            while (at && x.stride(order[at - 1]) < x.stride(i)) at--;
        order.insert(order.begin() + at, i);
    }
    for (int64_t i = 0; i < n; i++) sizes.push_back(x.size(order[i])), back[order[i]] = i;
    Tensor made = make(sizes, x);
    return std::is_sorted(order.begin(), order.end()) ? made : made.permute(back);
}

// What both calls get besides q, k and their gradients; x: one of these. kept: the memory of copies.
struct Rope {
    lk_rope_args a = {};
    std::vector<Tensor> kept;
    Rope(const Heads &x, const Maybe &inv_freq, const Maybe &position, const Maybe &cos, const Maybe &sin,
         const Maybe &pair_axis, const Maybe &q_weight, const Maybe &k_weight, int64_t rotary_dim, bool interleaved,
         int64_t offset, double scale, double eps, double weight_offset)
    {
        const int64_t rotary = rotary_dim ? rotary_dim : x.dim, pairs = rotary / 2;
        TORCH_CHECK_VALUE(rotary > 0 && rotary % 2 == 0 && rotary <= x.dim, "lk: rotary_dim is ", rotary,
                          "; it must be even, above 0, and at most dim, which is ", x.dim);
        TORCH_CHECK_VALUE((float)scale != 0, "lk: scale is 0; it must be another finite value");
        TORCH_CHECK_VALUE(has(cos) == has(sin), "lk: ", has(cos) ? "cos" : "sin", " is given without ",
                          has(cos) ? "sin" : "cos");
        TORCH_CHECK_VALUE(has(inv_freq) || has(cos), "lk: inv_freq is needed, or cos and sin");
        TORCH_CHECK_VALUE(!has(inv_freq) || !has(cos), "lk: inv_freq is given, and so are cos and sin; give one of both");
        TORCH_CHECK_VALUE(!has(position) || has(inv_freq),
                          "lk: position is for inv_freq; cos and sin are those of the tokens already");
        TORCH_CHECK_VALUE(!offset || (has(inv_freq) && !has(position)), "lk: offset is ", offset,
                          "; it is for inv_freq without position");
        a.batch = x.batch, a.tokens = x.tokens, a.dim = x.dim, a.rotary = rotary, a.interleaved = interleaved;
        a.offset = offset, a.scale = (float)scale, a.eps = (float)eps, a.weight_offset = (float)weight_offset;
        if (has(inv_freq)) {
            TORCH_CHECK_TYPE(inv_freq->scalar_type() == at::kFloat, "lk: inv_freq must be float32, not ",
                             dtype_name(inv_freq->scalar_type()));
            TORCH_CHECK_VALUE(inv_freq->dim() == 1 && inv_freq->size(0) == pairs, "lk: inv_freq has shape ", inv_freq->sizes(),
                              "; with rotary_dim ", rotary, " it must be [", pairs, "]");
            a.inv_freq = (const float *)keep(*inv_freq);
        }
        if (has(position)) fill_position(*position);
        TORCH_CHECK_VALUE(has(pair_axis) || a.axes < 2, "lk: position has ", a.axes, " axes, so pair_axis is needed");
        if (has(pair_axis)) {
            TORCH_CHECK_VALUE(a.axes, "lk: pair_axis is for a position of [axes, batch, tokens]");
            TORCH_CHECK_TYPE(pair_axis->scalar_type() == at::kInt, "lk: pair_axis must be int32, not ",
                             dtype_name(pair_axis->scalar_type()));
            TORCH_CHECK_VALUE(pair_axis->dim() == 1 && pair_axis->size(0) == pairs, "lk: pair_axis has shape ",
                              pair_axis->sizes(), "; with rotary_dim ", rotary, " it must be [", pairs, "]");
            a.pair_axis = (const int32_t *)keep(*pair_axis);
        }
        if (has(cos)) fill_tables(*cos, *sin, x.t.scalar_type());
        a.q_weight = weight(q_weight, x, "q_weight"), a.k_weight = weight(k_weight, x, "k_weight");
        if (has(q_weight) && has(k_weight))
            TORCH_CHECK_TYPE(q_weight->scalar_type() == k_weight->scalar_type(), "lk: k_weight is ",
                             dtype_name(k_weight->scalar_type()), ", and q_weight ", dtype_name(q_weight->scalar_type()),
                             "; they must have one type");
    }
    std::string batches() const { return (a.batch == 1 ? "[1" : "[" + std::to_string(a.batch) + " or 1") + ", "; }
    const void *keep(const Tensor &t) { return kept.emplace_back(t.contiguous()).const_data_ptr(); }
    const void *weight(const Maybe &t, const Heads &x, const char *name)
    {
        if (!has(t)) return nullptr;
        TORCH_CHECK_VALUE(t->dim() == 1 && t->size(0) == x.dim, "lk: ", name, " has shape ", t->sizes(), "; it must be [",
                          x.dim, "]");
        a.weight_dtype = type_beside(*t, x.t.scalar_type(), name);
        return keep(*t);
    }
    void fill_position(const Tensor &position)
    {
        const at::ScalarType type = position.scalar_type();
        const int64_t n = position.dim(), batch = n > 1 ? position.size(-2) : 1;
        TORCH_CHECK_TYPE(type == at::kLong || type == at::kInt, "lk: position must be int64 or int32, not ", dtype_name(type));
        TORCH_CHECK_VALUE(n >= 1 && n <= 3 && position.size(-1) == a.tokens && (batch == 1 || batch == a.batch),
                          "lk: position has shape ", position.sizes(), "; it must be [", a.tokens, "], ", batches(), a.tokens,
                          "] or [axes, ", batches().substr(1), a.tokens, "]");
        TORCH_CHECK_VALUE(n < 3 || (position.size(0) >= 1 && position.size(0) <= 8), "lk: position has ", position.size(0),
                          " axes; it must have 1 to 8");
        a.axes = n == 3 ? (int)position.size(0) : 0, a.position_dtype = type == at::kInt;
        a.shared_positions = batch == 1, a.position = keep(position);
    }
    // Tables of rotary / 2 columns, or of rotary ones, where each number stands twice: in the other half, or beside itself.
    void fill_tables(const Tensor &cos, const Tensor &sin, at::ScalarType type)
    {
        const int64_t n = cos.dim(), batch = n == 3 ? cos.size(0) : 1, cols = n ? cos.size(-1) : 0;
        TORCH_CHECK_VALUE((n == 2 || n == 3) && cos.size(-2) == a.tokens && (batch == 1 || batch == a.batch) &&
                              (cols == a.rotary / 2 || cols == a.rotary),
                          "lk: cos has shape ", cos.sizes(), "; it must be [", a.tokens, ", ", a.rotary / 2, " or ", a.rotary,
                          "] or ", batches(), a.tokens, ", ", a.rotary / 2, " or ", a.rotary, "]");
        TORCH_CHECK_VALUE(sin.sizes() == cos.sizes(), "lk: sin has shape ", sin.sizes(), ", and cos ", cos.sizes());
        TORCH_CHECK_TYPE(sin.scalar_type() == cos.scalar_type(), "lk: sin is ", dtype_name(sin.scalar_type()), ", and cos ",
                         dtype_name(cos.scalar_type()), "; they must have one type");
        a.table_dtype = type_beside(cos, type, "cos");
        bool fits = cos.strides() == sin.strides() && cos.stride(-1) == 1 && (a.tokens <= 1 || cos.stride(-2) > 0);
        a.cos = fits ? cos.const_data_ptr() : keep(cos), a.sin = fits ? sin.const_data_ptr() : keep(sin);
        a.shared_positions = batch == 1 || (fits && cos.stride(0) == 0);
        a.table_stride[1] = fits && a.tokens > 1 ? cos.stride(-2) : cols;
        a.table_stride[0] = a.shared_positions ? 0 : fits ? cos.stride(0) : a.tokens * cols;
        a.table_step = a.interleaved && cols == a.rotary && a.rotary ? 2 : 1;
    }
};

#define LK_ROPE_PARAMETERS                                                                                                     \
    const Maybe &inv_freq, const Maybe &position, const Maybe &cos, const Maybe &sin, const Maybe &pair_axis,                  \
        const Maybe &q_weight, const Maybe &k_weight, int64_t rotary_dim, bool interleaved, bool heads_first
#define LK_ROPE_NUMBERS double scale, double eps, double weight_offset

static tuple<Tensor, Tensor> rope_forward(const Tensor &q, const Maybe &k, LK_ROPE_PARAMETERS, int64_t offset,
                                          LK_ROPE_NUMBERS)
{
    check_input(q, "q");
    const Stream stream(q);
    const Heads from_q(q, "q", heads_first);
    std::optional<Heads> from_k;
    Rope call(from_q, inv_freq, position, cos, sin, pair_axis, q_weight, k_weight, rotary_dim, interleaved, offset, scale, eps,
              weight_offset);
    lk_rope_args &a = call.a;
    Tensor y_q = make_in_order(from_q.t), y_k;
    a.q = from_q.data(), a.q_out = y_q.mutable_data_ptr(), a.q_heads = from_q.heads;
    fill_strides(a.q_stride, from_q.t, heads_first), fill_strides(a.q_out_stride, y_q, heads_first);
    if (has(k)) {
        from_k.emplace(*k, "k", heads_first);
        TORCH_CHECK_TYPE(k->scalar_type() == q.scalar_type(), "lk: k is ", dtype_name(k->scalar_type()), ", and q ",
                         dtype_name(q.scalar_type()), "; they must have one type");
        TORCH_CHECK_VALUE(k->dim() == q.dim() && from_k->batch == from_q.batch && from_k->tokens == from_q.tokens &&
                              from_k->dim == from_q.dim, "lk: k has shape ", k->sizes(), ", and q ", q.sizes(),
                          "; they may differ in heads alone");
        y_k = make_in_order(from_k->t);
        a.k = from_k->data(), a.k_out = y_k.mutable_data_ptr(), a.k_heads = from_k->heads;
        fill_strides(a.k_stride, from_k->t, heads_first), fill_strides(a.k_out_stride, y_k, heads_first);
    } else
        TORCH_CHECK_VALUE(!has(k_weight), "lk: k_weight is given without k");
    if (q.numel() || (has(k) && k->numel())) LK_RUN(lk_rope_forward, q, &a, stream);
    return {y_q, y_k};
}

// Of one of q and k in backward: its upstream gradient, itself where it has a norm, and what is wanted.
struct RopeSide {
    std::optional<Heads> up, x;
    Tensor d, dweight;
    RopeSide(const Maybe &dy, const Maybe &x_, const Maybe &weight, bool want, bool want_weight, bool heads_first)
    {
        if (!has(dy) || (!want && !want_weight)) return;
        up.emplace(*dy, "the gradient", heads_first);
        if (has(weight)) x.emplace(*x_, "q or k", heads_first);
        if (want) d = make_in_order(up->t);
        if (!want_weight) return;
        dweight = make(weight->sizes(), *weight);
        if (!dy->numel()) dweight.zero_();
    }
};

// dq, dk, dq_weight, dk_weight. q and k are given where they have a norm. A result without an upstream gradient gets nothing.
static tuple<Tensor, Tensor, Tensor, Tensor> rope_backward(const Maybe &dy_q, const Maybe &dy_k, const Maybe &q, const Maybe &k,
                                                           LK_ROPE_PARAMETERS, int64_t offset, LK_ROPE_NUMBERS, bool want_q,
                                                           bool want_k, bool want_q_weight, bool want_k_weight)
{
    const RopeSide of_q(dy_q, q, q_weight, want_q, want_q_weight, heads_first);
    const RopeSide of_k(dy_k, k, k_weight, want_k, want_k_weight, heads_first);
    if (!of_q.up && !of_k.up) return {};
    const Heads &one = of_q.up ? *of_q.up : *of_k.up;
    const Stream stream(one.t);
    // A norm of heads that are not there would want them.
    Rope call(one, inv_freq, position, cos, sin, pair_axis, of_q.up ? q_weight : Maybe(), of_k.up ? k_weight : Maybe(),
              rotary_dim, interleaved, offset, scale, eps, weight_offset);
    lk_rope_args &a = call.a;
    const auto fill = [&](const RopeSide &side, int64_t *heads, const void **up, int64_t (&up_stride)[3], const void **x,
                          int64_t (&x_stride)[3], void **d, int64_t (&d_stride)[3], void **dweight) {
        if (!side.up) return;
        *heads = side.up->heads, *up = side.up->data(), fill_strides(up_stride, side.up->t, heads_first);
        if (side.x) *x = side.x->data(), fill_strides(x_stride, side.x->t, heads_first);
        if (side.d.defined()) *d = side.d.mutable_data_ptr(), fill_strides(d_stride, side.d, heads_first);
        if (side.dweight.defined()) *dweight = side.dweight.mutable_data_ptr();
    };
    fill(of_q, &a.q_heads, &a.dq_out, a.dq_out_stride, &a.q, a.q_stride, &a.dq, a.dq_stride, &a.dq_weight);
    fill(of_k, &a.k_heads, &a.dk_out, a.dk_out_stride, &a.k, a.k_stride, &a.dk, a.dk_stride, &a.dk_weight);
    const tuple out(of_q.d, of_k.d, of_q.dweight, of_k.dweight);
    if (!(of_q.up && of_q.up->t.numel()) && !(of_k.up && of_k.up->t.numel())) return out;
    if (a.dq_weight || a.dk_weight) LK_RUN(lk_rope_backward_workspace_bytes, one.t, &a, &a.workspace_bytes);
    const Workspace workspace(a.workspace_bytes);
    a.workspace = workspace.start;
    LK_RUN(lk_rope_backward, one.t, &a, stream);
    return out;
}

using RopeForward = tuple<Tensor, Tensor>(const Tensor &, const Maybe &, const Maybe &, const Maybe &, const Maybe &,
                                          const Maybe &, const Maybe &, const Maybe &, const Maybe &, int64_t, bool, bool,
                                          c10::SymInt, double, double, double);
using RopeGradients = tuple<Tensor, Tensor, Tensor, Tensor>(const Maybe &, const Maybe &, const Maybe &, const Maybe &,
                                                            const Maybe &, const Maybe &, const Maybe &, const Maybe &,
                                                            const Maybe &, const Maybe &, const Maybe &, int64_t, bool, bool,
                                                            c10::SymInt, double, double, double, bool, bool, bool, bool);

// Edges: q, k, q_weight, k_weight. Outputs: y_q and y_k. q and k are kept where they have a norm.
struct RopeBackward : Node {
    SavedVariable q, k, inv_freq, position, cos, sin, pair_axis, q_weight, k_weight;
    int64_t rotary_dim;
    bool interleaved, heads_first, has_k;
    c10::SymInt offset;
    double scale, eps, weight_offset;
    variable_list apply(variable_list &&up) override
    {
        LK_OP_AS(rope_backward, RopeGradients);
        const std::lock_guard<std::mutex> lock(mutex_);
        const Tensor dy_q = up[0], dy_k = has_k ? up[1] : Tensor();
        variable_list d(4);
        if (!dy_q.defined() && !dy_k.defined()) return d;
        const Tensor x = q.unpack(), y = k.unpack(), f = inv_freq.unpack(), p = position.unpack(), c = cos.unpack();
        const Tensor s = sin.unpack(), axis = pair_axis.unpack(), of_q = q_weight.unpack(), of_k = k_weight.unpack();
        const Below below;
        const bool on_q = dy_q.defined(), on_k = dy_k.defined();
        const bool want[] = {on_q && task_should_compute_output(0), on_k && task_should_compute_output(1),
                             on_q && of_q.defined() && task_should_compute_output(2),
                             on_k && of_k.defined() && task_should_compute_output(3)};
        if (!want[0] && !want[1] && !want[2] && !want[3]) return d;
        std::tie(d[0], d[1], d[2], d[3]) = rope_backward_op.call(
            maybe(dy_q), maybe(dy_k), maybe(x), maybe(y), maybe(f), maybe(p), maybe(c), maybe(s), maybe(axis), maybe(of_q),
            maybe(of_k), rotary_dim, interleaved, heads_first, offset, scale, eps, weight_offset, want[0], want[1], want[2],
            want[3]);
        for (int i = 0; i < 4; i++)
            if (!want[i]) d[i] = Tensor(); // the dispatcher's has no elements
        return once(*this, up, std::move(d), "rope");
    }
    void release_variables() override
    {
        for (SavedVariable *v : {&q, &k, &inv_freq, &position, &cos, &sin, &pair_axis, &q_weight, &k_weight}) v->reset_data();
    }
};

tuple<Tensor, Tensor> rope(const Tensor &q, const Maybe &k, LK_ROPE_PARAMETERS, c10::SymInt offset, LK_ROPE_NUMBERS)
{
    LK_OP_AS(rope_forward, RopeForward);
    check_input(q, "q");
    const std::pair<const char *, const Maybe &> constants[] = {{"inv_freq", inv_freq}, {"cos", cos}, {"sin", sin}};
    for (const auto &[name, t] : constants)
        TORCH_CHECK_VALUE(!wants_gradient(t), "lk: ", name, " requires a gradient, and gets none; detach it");
    const bool wanted = wants_gradient(q, k, q_weight, k_weight);
    const auto node = wanted ? make_node<RopeBackward>(q, k, q_weight, k_weight) : nullptr;
    Tensor y_q, y_k;
    {
        const Below below;
        std::tie(y_q, y_k) = rope_forward_op.call(q, k, inv_freq, position, cos, sin, pair_axis, q_weight, k_weight, rotary_dim,
                                                  interleaved, heads_first, offset, scale, eps, weight_offset);
    }
    if (!has(k)) y_k = Tensor();
    if (!wanted) return {y_q, y_k};
    torch::autograd::set_history(y_q, node);
    if (has(k)) torch::autograd::set_history(y_k, node);
    node->q = save(has(q_weight) ? q : Tensor()), node->k = save(has(k_weight) ? k : Maybe());
    node->inv_freq = save(inv_freq), node->position = save(position), node->cos = save(cos), node->sin = save(sin);
    node->pair_axis = save(pair_axis), node->q_weight = save(q_weight), node->k_weight = save(k_weight);
    node->rotary_dim = rotary_dim, node->interleaved = interleaved, node->heads_first = heads_first, node->has_k = has(k);
    node->offset = std::move(offset), node->scale = scale, node->eps = eps, node->weight_offset = weight_offset;
    node_is_made(node);
    return {y_q, y_k};
}

#define OPTIONS                                                                                                                \
    "Tensor? inv_freq, Tensor? position, Tensor? cos, Tensor? sin, Tensor? pair_axis, Tensor? q_weight, Tensor? k_weight, "    \
    "int rotary_dim, bool interleaved, bool heads_first, SymInt offset, float scale, float eps, float weight_offset"
LK_OPS(m)
{
    user_op(m, "rope", "(Tensor q, Tensor? k, " OPTIONS ") -> (Tensor, Tensor)", &rope);
    kernel(m, "rope_forward", "(Tensor q, Tensor? k, " OPTIONS ") -> (Tensor, Tensor)", &rope_forward);
    kernel(m, "rope_backward", "(Tensor? dy_q, Tensor? dy_k, Tensor? q, Tensor? k, " OPTIONS ", bool want_q, bool want_k, "
           "bool want_q_weight, bool want_k_weight) -> (Tensor, Tensor, Tensor, Tensor)", &rope_backward);
}

} // namespace lk_torch

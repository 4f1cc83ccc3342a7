// SPDX-License-Identifier: MIT
// linear_support, and support of logits, on one device or with the classes split over the ranks of a group: lk/linear_support.cuh.
#include "lk_torch.h"

#include <ATen/autocast_mode.h>

#include "lk/linear_support.cuh"
LK_DECLARE_ALL(LINEAR_SUPPORT)

namespace lk_torch {

// Without weight x is the logits of all classes. group: "" where the classes are not split; else this rank has classes vocab_start
// to vocab_start + rows of weight, or columns of the logits, of vocab_total.
#define PARAMETERS                                                                                                             \
    const Tensor &x, const Maybe &weight, const Tensor &ids, const Tensor &offsets, const Maybe &target, const Maybe &bias,    \
        const Maybe &teacher_logp, double softcap, double logit_scale, int64_t ignore_index, std::string group,                \
        int64_t vocab_start, int64_t vocab_total, int64_t parts
#define OPTIONS                                                                                                                \
    x, weight, ids, offsets, target, bias, teacher_logp, softcap, logit_scale, ignore_index, group, vocab_start, vocab_total, parts

static void check_index(const Tensor &t, const char *name, const char *what)
{
    TORCH_CHECK_TYPE(t.scalar_type() == at::kLong || t.scalar_type() == at::kInt, "lk: ", name, " must be int64 or int32 ", what,
                     ", not ", dtype_name(t.scalar_type()));
}

// The arguments that both calls have, and what keeps their memory.
struct SupportCall {
    lk_linear_support_args a = {};
    const char *name; // of x
    Stream stream;
    HeadInput input;
    std::optional<Rows> rows, columns; // of a head
    Tensor i, o, y, teacher, b;
    SupportCall(PARAMETERS)
        : name(has(weight) ? "input" : "logits"), stream((check_input(x, name), x)), input(x, parts, group)
    {
        const at::IntArrayRef all = input.all.sizes();
        TORCH_CHECK_VALUE(!all.empty(), "lk: ", name, " needs at least one dimension");
        const at::IntArrayRef tokens = all.slice(0, all.size() - 1);
        a.tokens = c10::multiply_integers(tokens), a.hidden = 1, a.vocab = all.back();
        if (has(weight)) {
            rows.emplace(head_rows(input.all, name));
            columns.emplace(weight_beside(*weight, x, "linear_weight", &a.dweight_dtype), "linear_weight");
            TORCH_CHECK_VALUE(weight->dim() == 2 && columns->cols == rows->cols, "lk: linear_weight has shape ", weight->sizes(),
                              "; it must be [classes, ", rows->cols, "]");
            a.x = rows->data(), a.x_stride = rows->stride, a.hidden = rows->cols;
            a.weight = columns->data(), a.weight_stride = columns->stride, a.vocab = columns->rows;
        }
        TORCH_CHECK_VALUE((float)logit_scale != 0, "lk: logit_scale is 0; it must be above 0");
        check_index(ids, "ids", "numbers of classes"), check_index(offsets, "offsets", "numbers");
        TORCH_CHECK_VALUE(ids.dim() == 1, "lk: ids has shape ", ids.sizes(), "; it must have one dimension");
        TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.size(0) == a.tokens + 1, "lk: offsets has shape ", offsets.sizes(),
                          "; with ", name, " of ", all, " it must be [", a.tokens + 1, "]");
        const bool widens = has(target) && target->scalar_type() == at::kLong; // a target keeps all its bits
        i = ids.to(widens ? at::kLong : ids.scalar_type()).contiguous(), o = offsets.contiguous();
        a.ids = i.const_data_ptr(), a.offsets = o.const_data_ptr(), a.entries = ids.size(0);
        a.offsets_dtype = o.scalar_type() == at::kInt ? LK_TARGET_INT32 : LK_TARGET_INT64;
        a.target_dtype = i.scalar_type() == at::kInt ? LK_TARGET_INT32 : LK_TARGET_INT64;
        if (has(target)) {
            TORCH_CHECK_VALUE(target->sizes() == tokens, "lk: target has shape ", target->sizes(), "; with ", name, " of ", all,
                              " it must be ", tokens);
            TORCH_CHECK_TYPE(at::isIntegralType(target->scalar_type(), false), "lk: target must be numbers of classes, not ",
                             dtype_name(target->scalar_type()));
            y = target->to(i.scalar_type()).contiguous();
            a.target = y.const_data_ptr(), a.use_ignore_index = 1, a.ignore_index = ignore_index;
        }
        if (has(teacher_logp)) {
            TORCH_CHECK_VALUE(teacher_logp->sizes() == ids.sizes(), "lk: teacher_logp has shape ", teacher_logp->sizes(),
                              "; it must be ", ids.sizes());
            TORCH_CHECK_TYPE(teacher_logp->is_floating_point(), "lk: teacher_logp must have a floating type, not ",
                             dtype_name(teacher_logp->scalar_type()));
            teacher = teacher_logp->to(at::kFloat).contiguous();
            a.teacher_logp = teacher.const_data_ptr<float>();
        }
        if (has(bias)) {
            TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == a.vocab, "lk: linear_bias has shape ", bias->sizes(),
                              "; it must be [", a.vocab, "]");
            b = bias->contiguous();
            a.bias = b.const_data_ptr(), a.bias_dtype = type_beside(b, x.scalar_type(), "linear_bias");
        }
        a.softcap = (float)softcap, a.logit_scale = (float)logit_scale;
        if (!group.empty()) a.vocab_start = vocab_start, a.vocab_total = vocab_total;
    }
};
#define RUN(function, call, x)                                                                                                 \
    do {                                                                                                                       \
        LK_RUN(function##_workspace_bytes, x, &call.a, &call.a.workspace_bytes);                                               \
        const Workspace workspace(call.a.workspace_bytes);                                                                     \
        call.a.workspace = workspace.start;                                                                                    \
        call.input.gather();                                                                                                   \
        LK_RUN(function, x, &call.a, call.stream);                                                                             \
    } while (0)

// logp (without a target undefined), lse, entropy, kl (without teacher_logp undefined), support_logp, logits.
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> linear_support_forward(PARAMETERS)
{
    SupportCall c(OPTIONS);
    lk_linear_support_args &a = c.a;
    std::optional<Rows> full;
    if (!has(weight)) {
        full.emplace(x, c.name);
        a.full_logits_stride = full->stride;
        a.full_logits = x.numel() ? full->data() : a.offsets; // not NULL on a rank without columns
    }
    const at::IntArrayRef tokens = c.input.all.sizes().slice(0, x.dim() - 1);
    Tensor logp, kl;
    const Tensor lse = make(tokens, x, at::kFloat), entropy = make(tokens, x, at::kFloat);
    const Tensor support_logp = make(ids.sizes(), x, at::kFloat), logits = make(ids.sizes(), x, at::kFloat);
    a.logits = logits.mutable_data_ptr<float>();
    if (!group.empty() && ids.numel()) { // of other ranks' ids 0
        RUN(lk_linear_support_forward, c, x);
        collective("_c10d_functional::all_reduce_", logits, "sum", group);
        wait(logits);
    }
    a.logits_given = !group.empty();
    if (has(target)) logp = make(tokens, x, at::kFloat), a.logp = logp.mutable_data_ptr<float>();
    if (has(teacher_logp)) kl = make(tokens, x, at::kFloat), a.kl = kl.mutable_data_ptr<float>();
    a.lse = lse.mutable_data_ptr<float>(), a.entropy = entropy.mutable_data_ptr<float>();
    a.support_logp = support_logp.mutable_data_ptr<float>();
    RUN(lk_linear_support_forward, c, x);
    return {logp, lse, entropy, kl, support_logp, logits};
}

static tuple<Tensor, Tensor, Tensor>
linear_support_backward(const Maybe &dlogp, const Maybe &dlse, const Maybe &dentropy, const Maybe &dkl, const Maybe &dsupport_logp,
                        const Tensor &logits, PARAMETERS, bool want_dx, bool want_dweight, bool want_dbias)
{
    SupportCall c(OPTIONS);
    lk_linear_support_args &a = c.a;
    const Maybe given[] = {packed(dlogp), packed(dlse), packed(dentropy), packed(dkl), packed(dsupport_logp)};
    const float **const fields[] = {&a.dlogp, &a.dlse, &a.dentropy, &a.dkl, &a.dsupport_logp};
    bool some = false;
    for (int k = 0; k < 5; k++)
        if (has(given[k])) *fields[k] = given[k]->const_data_ptr<float>(), some = true;
    const Tensor z = logits.contiguous();
    a.logits = (float *)z.const_data_ptr<float>();
    Tensor dx, dweight, dbias;
    if (want_dx) dx = make(some ? c.input.all.sizes() : x.sizes(), x);
    if (want_dx) (has(weight) ? a.dx : a.dfull_logits) = dx.mutable_data_ptr();
    if (want_dweight) dweight = make(weight->sizes(), *weight), a.dweight = dweight.mutable_data_ptr();
    if (want_dbias) dbias = make({a.vocab}, c.b), a.dbias = dbias.mutable_data_ptr(), a.dbias_dtype = a.bias_dtype;
    if (!some) {
        for (const Tensor &t : {dx, dweight, dbias})
            if (t.defined()) t.zero_();
        return {dx, dweight, dbias};
    }
    if ((want_dx && x.numel()) || (want_dweight && weight->numel()) || (want_dbias && a.vocab))
        RUN(lk_linear_support_backward, c, x);
    c.input.gather(); // where this rank has computed nothing
    if (want_dx && has(weight) && !group.empty()) {
        if (parts == 1) collective("_c10d_functional::all_reduce_", dx, "sum", group);
        else dx = c.input.sum(dx);
        wait(dx);
    }
    return {dx, dweight, dbias};
}

struct LinearSupportBackward : Node {
    SavedVariable x, weight, ids, offsets, target, bias, teacher_logp, logits;
    double softcap, logit_scale;
    int64_t ignore_index, vocab_start, vocab_total, parts;
    std::string group;
    int at[5]; // the number of each result among those that there are; -1: it is not there
    variable_list apply(variable_list &&up) override
    {
        LK_OP(linear_support_backward);
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto of = [&](int k) { return at[k] < 0 ? Maybe() : maybe(up[at[k]]); };
        const Maybe dlogp = of(0), dlse = of(1), dentropy = of(2), dkl = of(3), dsupport_logp = of(4);
        if (!has(dlogp) && !has(dlse) && !has(dentropy) && !has(dkl) && !has(dsupport_logp)) return variable_list(3);
        const Tensor in = x.unpack(), i = ids.unpack(), o = offsets.unpack(), z = logits.unpack();
        const Maybe w = maybe(weight.unpack()), b = maybe(bias.unpack());
        const Maybe y = maybe(target.unpack()), q = maybe(teacher_logp.unpack());
        const Below below;
        auto [dx, dweight, dbias] = linear_support_backward_op.call(
            dlogp, dlse, dentropy, dkl, dsupport_logp, z, in, w, i, o, y, b, q, softcap, logit_scale, ignore_index, group,
            vocab_start, vocab_total, parts, task_should_compute_output(0), task_should_compute_output(1),
            task_should_compute_output(2));
        return once(*this, up, {dx, dweight, dbias}, w ? "linear_support" : "support");
    }
    void release_variables() override
    {
        x.reset_data(), weight.reset_data(), ids.reset_data(), offsets.reset_data(), target.reset_data(), bias.reset_data();
        teacher_logp.reset_data(), logits.reset_data();
    }
};

tuple<Tensor, Tensor, Tensor, Tensor, Tensor> linear_support(PARAMETERS)
{
    LK_OP(linear_support_forward);
    check_input(x, has(weight) ? "input" : "logits");
    TORCH_CHECK_VALUE(!wants_gradient(teacher_logp), "lk: teacher_logp requires a gradient, and gets none; detach it");
    const bool wanted = wants_gradient(x, weight, bias);
    const auto node = wanted ? make_node<LinearSupportBackward>(x, weight.value_or(Tensor()), bias.value_or(Tensor())) : nullptr;
    Tensor logp, lse, entropy, kl, support_logp, logits;
    {
        const Below below;
        std::tie(logp, lse, entropy, kl, support_logp, logits) = linear_support_forward_op.call(OPTIONS);
    }
    if (!has(target)) logp.reset();
    if (!has(teacher_logp)) kl.reset();
    if (!wanted) return {logp, lse, entropy, kl, support_logp};
    const Tensor results[] = {logp, lse, entropy, kl, support_logp};
    for (int k = 0, count = 0; k < 5; k++) {
        node->at[k] = results[k].defined() ? count++ : -1;
        if (results[k].defined()) torch::autograd::set_history(results[k], node);
    }
    // Backward reads no logits of all classes: of these the shape is kept, and not the memory.
    node->x = save(has(weight) ? x : x.new_empty({}).expand_symint(x.sym_sizes()));
    node->weight = save(weight), node->ids = save(ids), node->offsets = save(offsets);
    node->target = save(target), node->bias = save(bias), node->teacher_logp = save(teacher_logp), node->logits = save(logits);
    node->softcap = softcap, node->logit_scale = logit_scale, node->ignore_index = ignore_index, node->group = group;
    node->vocab_start = vocab_start, node->vocab_total = vocab_total, node->parts = parts;
    node_is_made(node);
    return {logp, lse, entropy, kl, support_logp};
}

// As F.linear: the products' tensors in autocast's type. Logits are taken as they are.
static tuple<Tensor, Tensor, Tensor, Tensor, Tensor> linear_support_autocast(PARAMETERS)
{
    LK_OP(linear_support);
    const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKeySet(c10::DispatchKey::LK_AUTOCAST));
    const at::ScalarType type = at::autocast::get_autocast_dtype(LK_DEVICE_TYPE);
    const auto cast = [&](const auto &t) { return at::autocast::cached_cast(type, t, LK_DEVICE_TYPE); };
    return linear_support_op.call(has(weight) ? cast(x) : x, cast(weight), ids, offsets, target, cast(bias), teacher_logp, softcap,
                                  logit_scale, ignore_index, group, vocab_start, vocab_total, parts);
}

#define INPUTS                                                                                                                 \
    "Tensor x, Tensor? weight, Tensor ids, Tensor offsets, Tensor? target, Tensor? bias, Tensor? teacher_logp, "               \
    "float softcap, float logit_scale, int ignore_index, str group, int vocab_start, int vocab_total, int parts"
LK_OPS(m)
{
    user_op(m, "linear_support", "(" INPUTS ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)", &linear_support);
    kernel(m, "linear_support_forward", "(" INPUTS ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", &linear_support_forward);
    kernel(m, "linear_support_backward",
           "(Tensor? dlogp, Tensor? dlse, Tensor? dentropy, Tensor? dkl, Tensor? dsupport_logp, Tensor logits, " INPUTS
           ", bool want_dx, bool want_dweight, bool want_dbias) -> (Tensor, Tensor, Tensor)",
           &linear_support_backward);
    m.impl("linear_support", torch::dispatch(c10::DispatchKey::LK_AUTOCAST, &linear_support_autocast));
}

} // namespace lk_torch

// SPDX-License-Identifier: MIT
/* lk's functions as XLA FFI handlers, for JAX: plain C++, compiled by g++ and linked with the liblk.so of `make lib`.
 *
 * XLA calls the handler lk_cross_entropy_forward_bf16 with operands, results and attributes. All are named after the fields of
 * lk_cross_entropy_args: the attribute `inputs` lists the names of the operands, `outputs` those of the results, and every
 * other attribute is a field of its own name. A field that is not named stays 0, lk's "off". So an option that is not used
 * costs no operand, and the compiled program reads like a call from C:
 *     custom_call_target="lk_cross_entropy_forward_bf16",
 *     backend_config={inputs="logits target", outputs="loss lse", rows=4096, vocab=1024, use_ignore_index=1, ...}
 * The result `workspace` is scratch memory: XLA owns it, and lk_jax_<function>_bytes says at trace time how large it must be.
 *
 * -DLK_JAX_CPU makes the handlers of JAX's platform cpu, for the library of lk's simulator.
 */
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

#include "lk/cross_entropy_ids_parallel.cuh"
#include "lk/glu.cuh"
#include "lk/kl_parallel.cuh"
#include "lk/linear_cross_entropy.cuh"
#include "lk/linear_cross_entropy_ids_parallel.cuh"
#include "lk/linear_kl_parallel.cuh"
#include "lk/linear_support.cuh"
#include "lk/linear_topk.cuh"
#include "lk/lk_scale.cuh"
#include "lk/logsumexp.cuh"
#include "lk/md_lrpe_cosine.cuh"
#include "lk/rope.cuh"
#include "lk/srms_norm_fp8.cuh"
#include "lk/srms_norm_gated.cuh"

namespace ffi = xla::ffi;
using ffi::AnyBuffer, ffi::Error, ffi::ErrorCode, std::string_view;

/* ---- Fields by name ------------------------------------------------------------------------------------------------------ */

enum Kind { POINTER, INT, INT64, SIZE, FLOAT };
template <class V> constexpr Kind kind_of()
{
    if (std::is_pointer_v<V>) return POINTER;
    if (std::is_same_v<V, int>) return INT;
    if (std::is_same_v<V, int64_t>) return INT64;
    if (std::is_same_v<V, size_t>) return SIZE;
    return FLOAT;
}
struct Field {
    string_view name;
    size_t at;
    Kind kind;
};
template <class Args> struct Fields;
#define FIELD(name) {#name, offsetof(Args, name), kind_of<decltype(Args::name)>()},
#define COMMON(name) {#name, offsetof(Args, common.name), kind_of<decltype(decltype(Args::common)::name)>()},
#define WITHIN(name) {#name, offsetof(Args, common.common.name), kind_of<decltype(decltype(decltype(Args::common)::common)::name)>()},
/* A rank's. others: what finish writes to `states`, and backward reads there. */
#define RANKS \
    FIELD(states) FIELD(all_states) {"others", offsetof(Args, states), POINTER}, FIELD(parallel.vocab_total) FIELD(parallel.ranks)
#define ELEMENT(name, i) {#name #i, offsetof(Args, name) + i * sizeof(int64_t), INT64},
#define ELEMENTS(name) \
    ELEMENT(name, 0) ELEMENT(name, 1) ELEMENT(name, 2) ELEMENT(name, 3) \
    ELEMENT(name, 4) ELEMENT(name, 5) ELEMENT(name, 6) ELEMENT(name, 7)
#define FIELDS(op, ...)                                   \
    template <> struct Fields<lk_##op##_args> {           \
        using Args = lk_##op##_args;                      \
        static constexpr Field list[] = {__VA_ARGS__};    \
    };

FIELDS(logsumexp, FIELD(x) FIELD(lse) FIELD(lse_low) FIELD(lse_rounded) FIELD(dlse) FIELD(dlse_rounded)
       FIELD(dx) FIELD(outer) FIELD(cols) FIELD(inner) FIELD(scale))
FIELDS(glu, FIELD(gate) FIELD(up) FIELD(y) FIELD(dy) FIELD(dgate) FIELD(dup) FIELD(row_weight) FIELD(drow_weight) FIELD(rows)
       FIELD(cols) FIELD(activation) FIELD(interleaved) FIELD(alpha) FIELD(limit) FIELD(up_offset))
#define ROWS(MEMBER) \
    MEMBER(logits) MEMBER(target) MEMBER(class_weight) MEMBER(row_weight) MEMBER(upstream) MEMBER(dlse) MEMBER(dentropy) \
    MEMBER(denominator) MEMBER(loss) MEMBER(z_loss_out) MEMBER(lse) MEMBER(lse_low) MEMBER(entropy) MEMBER(argmax) \
    MEMBER(valid_rows) MEMBER(weight_sum) MEMBER(dlogits) MEMBER(workspace) MEMBER(workspace_bytes) MEMBER(rows) MEMBER(vocab) \
    MEMBER(ignore_index) MEMBER(logit_scale) MEMBER(softcap) MEMBER(label_smoothing) MEMBER(z_loss) MEMBER(use_ignore_index) \
    MEMBER(reduction) MEMBER(zero_when_empty) MEMBER(upstream_per_row) MEMBER(target_dtype) MEMBER(dlogits_dtype) \
    MEMBER(statistics) MEMBER(batch_invariant)
FIELDS(cross_entropy, ROWS(FIELD))
FIELDS(cross_entropy_parallel, ROWS(COMMON) RANKS)
#define ROWS_IDS(OF_ROWS, MEMBER) \
    OF_ROWS(logits) MEMBER(target_ids) MEMBER(target_weight) OF_ROWS(row_weight) OF_ROWS(upstream) OF_ROWS(dlse) MEMBER(dlogp) \
    MEMBER(tail_weight) MEMBER(dtail) MEMBER(tail) OF_ROWS(denominator) OF_ROWS(loss) MEMBER(logp) OF_ROWS(lse) \
    OF_ROWS(lse_low) OF_ROWS(valid_rows) OF_ROWS(dlogits) OF_ROWS(workspace) OF_ROWS(workspace_bytes) OF_ROWS(rows) \
    OF_ROWS(vocab) MEMBER(ids_per_row) OF_ROWS(ignore_index) OF_ROWS(logit_scale) OF_ROWS(softcap) OF_ROWS(z_loss) \
    OF_ROWS(use_ignore_index) OF_ROWS(reduction) OF_ROWS(zero_when_empty) OF_ROWS(upstream_per_row) OF_ROWS(target_dtype)
FIELDS(cross_entropy_ids, ROWS_IDS(COMMON, FIELD))
FIELDS(cross_entropy_ids_parallel, ROWS_IDS(WITHIN, COMMON) RANKS)
#define KL(MEMBER) \
    MEMBER(logits) MEMBER(teacher) MEMBER(row_weight) MEMBER(upstream) MEMBER(loss) MEMBER(entropy) MEMBER(dlogits) MEMBER(rows) \
    MEMBER(vocab) MEMBER(logit_scale) MEMBER(teacher_scale) MEMBER(softcap) MEMBER(teacher_softcap) MEMBER(beta) MEMBER(divergence) \
    MEMBER(upstream_per_row) MEMBER(batch_invariant)
FIELDS(kl, KL(FIELD))
FIELDS(kl_parallel, KL(COMMON) RANKS)
#define HEAD(MEMBER) \
    MEMBER(x) MEMBER(weight) MEMBER(bias) MEMBER(target) MEMBER(class_weight) MEMBER(row_weight) MEMBER(upstream) MEMBER(dlse) \
    MEMBER(dentropy) MEMBER(denominator) MEMBER(loss) MEMBER(z_loss_out) MEMBER(lse) MEMBER(lse_low) MEMBER(entropy) \
    MEMBER(argmax) MEMBER(valid_rows) MEMBER(weight_sum) MEMBER(dx) MEMBER(dweight) MEMBER(dbias) MEMBER(workspace) \
    MEMBER(workspace_bytes) MEMBER(tokens) MEMBER(hidden) MEMBER(vocab) MEMBER(ignore_index) MEMBER(max_counted) \
    MEMBER(logit_scale) MEMBER(softcap) MEMBER(label_smoothing) MEMBER(z_loss) MEMBER(use_ignore_index) MEMBER(reduction) \
    MEMBER(zero_when_empty) MEMBER(upstream_per_token) MEMBER(target_dtype) MEMBER(bias_dtype) MEMBER(dweight_dtype) \
    MEMBER(dbias_dtype) MEMBER(fast_logits) MEMBER(tf32) MEMBER(batch_invariant) MEMBER(statistics)
FIELDS(linear_cross_entropy, HEAD(FIELD))
FIELDS(linear_cross_entropy_parallel, HEAD(COMMON) RANKS)
#define HEAD_IDS(OF_HEAD, MEMBER) \
    OF_HEAD(x) OF_HEAD(weight) OF_HEAD(bias) MEMBER(target_ids) MEMBER(target_weight) OF_HEAD(row_weight) OF_HEAD(upstream) \
    OF_HEAD(dlse) MEMBER(dlogp) MEMBER(tail_weight) MEMBER(dtail) MEMBER(tail) OF_HEAD(denominator) OF_HEAD(loss) MEMBER(logp) \
    OF_HEAD(lse) OF_HEAD(lse_low) OF_HEAD(valid_rows) OF_HEAD(dx) OF_HEAD(dweight) OF_HEAD(dbias) OF_HEAD(workspace) \
    OF_HEAD(workspace_bytes) OF_HEAD(tokens) OF_HEAD(hidden) OF_HEAD(vocab) MEMBER(ids_per_row) OF_HEAD(ignore_index) OF_HEAD(max_counted) \
    OF_HEAD(logit_scale) OF_HEAD(softcap) OF_HEAD(z_loss) OF_HEAD(use_ignore_index) OF_HEAD(reduction) \
    OF_HEAD(zero_when_empty) OF_HEAD(upstream_per_token) OF_HEAD(target_dtype) OF_HEAD(bias_dtype) OF_HEAD(dweight_dtype) \
    OF_HEAD(dbias_dtype) OF_HEAD(fast_logits) OF_HEAD(tf32)
FIELDS(linear_cross_entropy_ids, HEAD_IDS(COMMON, FIELD))
FIELDS(linear_cross_entropy_ids_parallel, HEAD_IDS(WITHIN, COMMON) RANKS)
#define HEADS(MEMBER) \
    MEMBER(x) MEMBER(weight) MEMBER(bias) MEMBER(teacher_x) MEMBER(teacher_weight) MEMBER(teacher_bias) MEMBER(row_weight) \
    MEMBER(upstream) MEMBER(loss) MEMBER(entropy) MEMBER(dx) MEMBER(dweight) MEMBER(dbias) MEMBER(workspace) \
    MEMBER(workspace_bytes) MEMBER(tokens) MEMBER(hidden) MEMBER(teacher_hidden) MEMBER(vocab) MEMBER(logit_scale) MEMBER(teacher_scale) \
    MEMBER(softcap) MEMBER(teacher_softcap) MEMBER(beta) MEMBER(divergence) MEMBER(upstream_per_token) MEMBER(dweight_dtype) \
    MEMBER(fast_logits) MEMBER(tf32) MEMBER(max_counted)
FIELDS(linear_kl, HEADS(FIELD))
FIELDS(linear_kl_parallel, HEADS(COMMON) RANKS)
FIELDS(linear_support, FIELD(x) FIELD(weight) FIELD(full_logits) FIELD(bias) FIELD(offsets) FIELD(ids) FIELD(target)
       FIELD(teacher_logp) FIELD(logits) FIELD(logp) FIELD(lse) FIELD(entropy) FIELD(kl) FIELD(support_logp) FIELD(dlogp)
       FIELD(dlse) FIELD(dentropy) FIELD(dkl) FIELD(dsupport_logp) FIELD(dx) FIELD(dweight) FIELD(dbias) FIELD(dfull_logits)
       FIELD(workspace) FIELD(workspace_bytes) FIELD(tokens) FIELD(hidden) FIELD(vocab) FIELD(entries) FIELD(vocab_total)
       FIELD(ignore_index) FIELD(logit_scale) FIELD(softcap) FIELD(logits_given) FIELD(use_ignore_index) FIELD(offsets_dtype)
       FIELD(target_dtype) FIELD(bias_dtype) FIELD(dweight_dtype) FIELD(dbias_dtype))
FIELDS(linear_topk, FIELD(x) FIELD(weight) FIELD(bias) FIELD(seed) FIELD(offset) FIELD(ids) FIELD(logp) FIELD(lse) FIELD(score)
       FIELD(workspace) FIELD(workspace_bytes) FIELD(tokens) FIELD(hidden) FIELD(vocab) FIELD(logit_scale) FIELD(softcap) FIELD(k)
       FIELD(ids_dtype) FIELD(tf32))
FIELDS(md_lrpe_cosine, FIELD(x) FIELD(theta) FIELD(offset_device) FIELD(y) FIELD(dy) FIELD(dx) FIELD(dtheta) FIELD(workspace)
       FIELD(workspace_bytes) FIELD(batch) FIELD(heads) FIELD(dim) FIELD(e) FIELD(theta_heads) FIELD(theta_features)
       FIELD(prefix) FIELD(axes) ELEMENTS(shape) ELEMENTS(offset)
       FIELD(x_batch_stride) FIELD(x_head_stride) FIELD(x_token_stride) FIELD(y_batch_stride)
       FIELD(y_head_stride) FIELD(y_token_stride) FIELD(dy_batch_stride) FIELD(dy_head_stride) FIELD(dy_token_stride)
       FIELD(dx_batch_stride) FIELD(dx_head_stride) FIELD(dx_token_stride) FIELD(theta_dtype) FIELD(activation))
#define STRIDES(name) ELEMENT(name, 0) ELEMENT(name, 1) ELEMENT(name, 2)
FIELDS(rope, FIELD(q) FIELD(k) FIELD(q_out) FIELD(k_out) FIELD(dq_out) FIELD(dk_out) FIELD(dq) FIELD(dk) FIELD(position)
       FIELD(inv_freq) FIELD(pair_axis) FIELD(cos) FIELD(sin) FIELD(q_weight) FIELD(k_weight) FIELD(dq_weight) FIELD(dk_weight)
       FIELD(workspace) FIELD(workspace_bytes) FIELD(batch) FIELD(tokens) FIELD(q_heads) FIELD(k_heads) FIELD(dim) FIELD(rotary)
       FIELD(offset) STRIDES(q_stride) STRIDES(k_stride) STRIDES(q_out_stride) STRIDES(k_out_stride) STRIDES(dq_out_stride)
       STRIDES(dk_out_stride) STRIDES(dq_stride) STRIDES(dk_stride) ELEMENT(table_stride, 1) FIELD(table_step)
       FIELD(shared_positions) FIELD(axes) FIELD(interleaved) FIELD(position_dtype) FIELD(table_dtype) FIELD(weight_dtype)
       FIELD(scale) FIELD(eps) FIELD(weight_offset))
FIELDS(srms_norm, FIELD(x) FIELD(residual) FIELD(residual_out) FIELD(weight) FIELD(bias) FIELD(y) FIELD(dy)
       FIELD(dresidual_out) FIELD(dx) FIELD(dresidual) FIELD(dweight) FIELD(dbias) FIELD(workspace) FIELD(workspace_bytes)
       FIELD(rows) FIELD(cols) FIELD(groups) FIELD(eps) FIELD(weight_offset) FIELD(residual_dtype) FIELD(weight_dtype)
       FIELD(dweight_dtype) FIELD(batch_invariant) FIELD(round_sum))
FIELDS(srms_norm_fp8, COMMON(x) COMMON(residual) COMMON(residual_out) COMMON(weight) FIELD(tensor_scale) FIELD(amax) FIELD(q)
       FIELD(scale) FIELD(q_transposed) FIELD(transposed_scale) COMMON(rows) COMMON(cols) COMMON(eps) COMMON(weight_offset)
       COMMON(residual_dtype) COMMON(weight_dtype) COMMON(round_sum) FIELD(scaling) FIELD(format) FIELD(power_of_two)
       FIELD(scale_rounding))
FIELDS(srms_norm_gated, COMMON(x) COMMON(weight) COMMON(y) COMMON(dy) COMMON(dx) COMMON(dweight) COMMON(workspace)
       COMMON(workspace_bytes) COMMON(rows) COMMON(cols) COMMON(groups) COMMON(eps) COMMON(weight_offset) COMMON(weight_dtype)
       COMMON(dweight_dtype) COMMON(batch_invariant) FIELD(gate) FIELD(dgate) FIELD(gate_first))

/* Sets one field; false if there is none of that name and kind. */
template <class Args, class V> static bool set(Args &args, string_view name, V value)
{
    for (const Field &field : Fields<Args>::list) {
        if (field.name != name) continue;
        char *at = (char *)&args + field.at;
        if constexpr (std::is_pointer_v<V>) {
            if (field.kind != POINTER) return false;
            *(void **)at = value;
        } else {
            switch (field.kind) {
            case INT: *(int *)at = (int)value; break;
            case INT64: *(int64_t *)at = (int64_t)value; break;
            case SIZE: *(size_t *)at = (size_t)value; break;
            case FLOAT: *(float *)at = (float)value; break;
            default: return false;
            }
        }
        return true;
    }
    return false;
}

/* What no operand and no attribute says. glu without up and not in turns: a row of gate has both, and so has one of dgate.
 * element: the bytes of one. */
template <class Args> static void complete(Args &, size_t) {}
static void complete(lk_glu_args &args, size_t element)
{
    if (args.up || args.interleaved) return;
    args.gate_stride = args.up_stride = args.dgate_stride = args.dup_stride = 2 * args.cols;
    args.up = (const char *)args.gate + args.cols * element;
    if (args.dgate) args.dup = (char *)args.dgate + args.cols * element;
}

/* The struct that has an op's workspace and context. */
template <class Args> static Args &common_of(Args &args) { return args; }
static lk_cross_entropy_args &common_of(lk_cross_entropy_parallel_args &args) { return args.common; }
static lk_cross_entropy_args &common_of(lk_cross_entropy_ids_args &args) { return args.common; }
static lk_cross_entropy_args &common_of(lk_cross_entropy_ids_parallel_args &args) { return args.common.common; }
static lk_kl_args &common_of(lk_kl_parallel_args &args) { return args.common; }
static lk_linear_cross_entropy_args &common_of(lk_linear_cross_entropy_parallel_args &args) { return args.common; }
static lk_linear_cross_entropy_args &common_of(lk_linear_cross_entropy_ids_args &args) { return args.common; }
static lk_linear_cross_entropy_args &common_of(lk_linear_cross_entropy_ids_parallel_args &args) { return args.common.common; }
static lk_linear_kl_args &common_of(lk_linear_kl_parallel_args &args) { return args.common; }
static lk_srms_norm_args &common_of(lk_srms_norm_fp8_args &args) { return args.common; }
static lk_srms_norm_args &common_of(lk_srms_norm_gated_args &args) { return args.common; }

/* Takes the first word off a list of words. */
static string_view next_word(string_view &list)
{
    const size_t end = list.find(' ');
    const string_view word = list.substr(0, end);
    list.remove_prefix(end == string_view::npos ? list.size() : end + 1);
    return word;
}

/* ---- The call ------------------------------------------------------------------------------------------------------------ */

static Error failed(lk_status status)
{
    return Error(status < 0 && status > LK_ERR_CUBLAS ? ErrorCode::kInvalidArgument : ErrorCode::kInternal, lk_last_error());
}
static Error unknown(string_view name) { return Error(ErrorCode::kInternal, "lk_jax: no field " + std::string(name)); }

/* The ops with matmuls have contexts, one per type of context and device. They live as long as the process: at its end CUDA may be
 * gone before them. The mutex is held while a call is launched, since one host thread at a time may use a context. */
template <class Args> constexpr bool has_context = false;
template <> constexpr bool has_context<lk_linear_cross_entropy_args> = true;
template <> constexpr bool has_context<lk_linear_cross_entropy_parallel_args> = true;
template <> constexpr bool has_context<lk_linear_cross_entropy_ids_args> = true;
template <> constexpr bool has_context<lk_linear_cross_entropy_ids_parallel_args> = true;
template <> constexpr bool has_context<lk_linear_kl_args> = true;
template <> constexpr bool has_context<lk_linear_kl_parallel_args> = true;
template <> constexpr bool has_context<lk_linear_topk_args> = true;
static lk_status init(lk_linear_cross_entropy_context *context) { return lk_linear_cross_entropy_init(context); }
static lk_status init(lk_linear_kl_context *context) { return lk_linear_kl_init(context); }
static lk_status init(lk_linear_topk_context *context) { return lk_linear_topk_init(context); }

static std::mutex contexts_mutex;
template <class Context> static lk_status context_of(int device, Context **context)
{
    static auto *contexts = new std::map<int, std::unique_ptr<Context>>;
    auto &found = (*contexts)[device];
    if (!found) {
        auto made = std::make_unique<Context>();
        const lk_status status = init(made.get());
        if (status) return status;
        found = std::move(made);
    }
    *context = found.get();
    return LK_OK;
}

template <class Args, lk_status (*launch)(const Args *, cudaStream_t)>
static Error run(cudaStream_t stream, int device, ffi::RemainingArgs in, ffi::RemainingRets out, ffi::Dictionary attributes)
{
    Args args = {};
    string_view inputs, outputs;
    for (auto it = attributes.begin(); it != attributes.end(); ++it) {
        bool known = true;
        if (*it == "inputs") inputs = *attributes.get<string_view>(*it);
        else if (*it == "outputs") outputs = *attributes.get<string_view>(*it);
        else if (attributes.isa<float>(it)) known = set(args, *it, *attributes.get<float>(*it));
        else known = attributes.isa<int64_t>(it) && set(args, *it, *attributes.get<int64_t>(*it));
        if (!known) return unknown(*it);
    }
    for (size_t i = 0; i < in.size(); i++) {
        const string_view name = next_word(inputs);
        if (!set(args, name, (void *)in.get<AnyBuffer>(i)->untyped_data())) return unknown(name);
    }
    for (size_t i = 0; i < out.size(); i++) {
        const string_view name = next_word(outputs);
        ffi::Result<AnyBuffer> buffer = *out.get<AnyBuffer>(i);
        if (!set(args, name, buffer->untyped_data())) return unknown(name);
        if constexpr (!std::is_same_v<Args, lk_logsumexp_args> && !std::is_same_v<Args, lk_kl_args> &&
                      !std::is_same_v<Args, lk_glu_args>)
            if (name == "workspace") { // XLA's buffers start at multiples of 128 bytes on a GPU and of fewer on a CPU
                auto &its = common_of(args);
                const uintptr_t from = (uintptr_t)its.workspace, a = LK_WORKSPACE_ALIGNMENT, at = (from + a - 1) / a * a;
                its.workspace = (void *)at, its.workspace_bytes = buffer->size_bytes() - (at - from);
            }
    }
    if (in.size()) complete(args, ffi::ByteWidth(in.get<AnyBuffer>(0)->element_type()));
    lk_status status;
    if constexpr (has_context<Args>) {
        const std::lock_guard<std::mutex> lock(contexts_mutex);
        status = context_of(device, &common_of(args).context);
        if (!status) status = launch(&args, stream);
    } else {
        status = launch(&args, stream);
    }
    return status ? failed(status) : Error::Success();
}

#ifdef LK_JAX_CPU
#define PLATFORM "cpu"
#define BIND ffi::Ffi::Bind()
#define TRAITS {}
template <class Args, lk_status (*launch)(const Args *, cudaStream_t)>
static Error handle(ffi::RemainingArgs in, ffi::RemainingRets out, ffi::Dictionary attributes)
{
    return run<Args, launch>(nullptr, 0, in, out, attributes);
}
#else
#define PLATFORM "CUDA"
#define BIND ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>()
#define TRAITS {ffi::Traits::kCmdBufferCompatible} /* every call of lk can be captured in a CUDA graph */
template <class Args, lk_status (*launch)(const Args *, cudaStream_t)>
static Error handle(cudaStream_t stream, int32_t device, ffi::RemainingArgs in, ffi::RemainingRets out,
                    ffi::Dictionary attributes)
{
    return run<Args, launch>(stream, device, in, out, attributes);
}
#endif

/* lk_rescale: x, factor and divisor; the result is x itself, as input_output_aliases of the call demands. */
template <lk_status (*rescale)(const lk_rescale_args *, cudaStream_t)>
static Error run_rescale(cudaStream_t stream, AnyBuffer x, AnyBuffer factor, AnyBuffer divisor, ffi::Result<AnyBuffer> y)
{
    if (y->untyped_data() != x.untyped_data()) return Error(ErrorCode::kInternal, "lk_jax: rescale is not in place");
    lk_rescale_args args = {};
    args.x = x.untyped_data(), args.y = y->untyped_data(), args.count = (int64_t)x.element_count();
    args.factor = (const float *)factor.untyped_data(), args.divisor = (const float *)divisor.untyped_data();
    const lk_status status = rescale(&args, stream);
    return status ? failed(status) : Error::Success();
}
#ifdef LK_JAX_CPU
template <lk_status (*rescale)(const lk_rescale_args *, cudaStream_t)>
static Error handle_rescale(AnyBuffer x, AnyBuffer factor, AnyBuffer divisor, ffi::Result<AnyBuffer> y)
{
    return run_rescale<rescale>(nullptr, x, factor, divisor, y);
}
#define BIND_RESCALE ffi::Ffi::Bind()
#else
template <lk_status (*rescale)(const lk_rescale_args *, cudaStream_t)>
static Error handle_rescale(cudaStream_t stream, AnyBuffer x, AnyBuffer factor, AnyBuffer divisor, ffi::Result<AnyBuffer> y)
{
    return run_rescale<rescale>(stream, x, factor, divisor, y);
}
#define BIND_RESCALE ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()
#endif

/* ---- The workspace ------------------------------------------------------------------------------------------------------- */

/* The workspace of the plan within a budget; after LK_ERR_WORKSPACE the least budget. */
template <class Args, class Plan>
static lk_status planned(lk_status (*plan_for)(const Args *, size_t, Plan *), const Args &args, size_t budget, size_t *bytes)
{
    Plan plan = {};
    const lk_status status = plan_for(&args, budget, &plan);
    *bytes = plan.workspace_bytes;
    if (status != LK_ERR_WORKSPACE) return status;
    const lk_status any = plan_for(&args, (size_t)1 << 50, &plan);
    *bytes = plan.minimum_bytes;
    return any ? any : status;
}
template <class Args> static lk_status planned(std::nullptr_t, const Args &, size_t, size_t *) { return LK_OK; }

/* How many bytes the result `workspace` must have, 0 for none; -1 after an error, with lk_last_error(). lk checks shapes and
 * options here, so that a mistake is found while JAX traces. tensors: the names of all operands and results. names and values:
 * the other fields. A workspace_bytes among them is the budget of the plan of an op with a context; where it is too small, the
 * answer is minus the least one, which is some hundred bytes at least. */
template <class Args, lk_status (*query)(const Args *, size_t *), class PlanFor>
static int64_t bytes_of(PlanFor plan_for, const char *tensors, int count, const char *const *names, const double *values)
{
    Args args = {};
    for (string_view list = tensors; !list.empty();)
        if (!set(args, next_word(list), (void *)4096)) return -2; // any aligned address: a query reads none
    for (int i = 0; i < count; i++)
        if (!set(args, names[i], values[i])) return -2;
    complete(args, 4);
    // XLA may give a slice of a larger tensor, which starts anywhere. Without these two the ops answer for any alignment.
    if constexpr (std::is_same_v<Args, lk_srms_norm_args>) args.x = nullptr, args.residual_out = nullptr;
    if constexpr (std::is_same_v<Args, lk_srms_norm_gated_args>) args.common.x = nullptr;
    if constexpr (has_context<Args>) common_of(args).x = nullptr, common_of(args).weight = nullptr;
    size_t bytes = 0, budget = 0;
    if constexpr (has_context<Args>) budget = common_of(args).workspace_bytes;
    const lk_status status = budget ? planned(plan_for, args, budget, &bytes) : query(&args, &bytes);
    if (budget && status == LK_ERR_WORKSPACE) return -(int64_t)bytes;
    return status ? -1 : bytes ? (int64_t)bytes + LK_WORKSPACE_ALIGNMENT : 0;
}

/* The names of all handlers, each with a space. */
static std::string &functions()
{
    static std::string all;
    return all;
}
struct Named {
    Named(const char *name) { functions() += name; }
};

#define FUNCTION(op, direction, T, plan)                                                                                   \
    static const Named lk_jax_named_##op##_##direction##_##T(#op "_" #direction "_" #T " ");                               \
    XLA_FFI_DEFINE_HANDLER_SYMBOL(lk_jax_##op##_##direction##_##T, (handle<lk_##op##_args, lk_##op##_##direction##_##T>),  \
                                  BIND.RemainingArgs().RemainingRets().Attrs(), TRAITS);                                   \
    extern "C" int64_t lk_jax_##op##_##direction##_##T##_bytes(const char *tensors, int count, const char *const *names,   \
                                                               const double *values)                                       \
    {                                                                                                                      \
        return bytes_of<lk_##op##_args, lk_##op##_##direction##_workspace_bytes_##T>(plan, tensors, count, names, values); \
    }
#define FUNCTIONS(T)                                                                                                    \
    LK_DECLARE_LOGSUMEXP(T)                                                                                             \
    LK_DECLARE_GLU(T)                                                                                                   \
    LK_DECLARE_ROPE(T)                                                                                                  \
    LK_DECLARE_CROSS_ENTROPY(T)                                                                                         \
    LK_DECLARE_CROSS_ENTROPY_PARALLEL(T)                                                                                \
    LK_DECLARE_CROSS_ENTROPY_IDS(T)                                                                                     \
    LK_DECLARE_CROSS_ENTROPY_IDS_PARALLEL(T)                                                                            \
    LK_DECLARE_KL(T)                                                                                                    \
    LK_DECLARE_KL_PARALLEL(T)                                                                                           \
    LK_DECLARE_LINEAR_CROSS_ENTROPY(T)                                                                                  \
    LK_DECLARE_LINEAR_CROSS_ENTROPY_PARALLEL(T)                                                                         \
    LK_DECLARE_LINEAR_CROSS_ENTROPY_IDS(T)                                                                              \
    LK_DECLARE_LINEAR_CROSS_ENTROPY_IDS_PARALLEL(T)                                                                     \
    LK_DECLARE_LINEAR_KL(T)                                                                                             \
    LK_DECLARE_LINEAR_KL_PARALLEL(T)                                                                                    \
    LK_DECLARE_LINEAR_SUPPORT(T)                                                                                        \
    LK_DECLARE_LINEAR_TOPK(T)                                                                                           \
    LK_DECLARE_MD_LRPE_COSINE(T)                                                                                        \
    LK_DECLARE_SRMS_NORM(T)                                                                                             \
    LK_DECLARE_SRMS_NORM_FP8(T)                                                                                         \
    LK_DECLARE_SRMS_NORM_GATED(T)                                                                                       \
    LK_DECLARE_SCALE(T)                                                                                                 \
    static const Named lk_jax_named_rescale_##T("rescale_" #T " ");                                                     \
    XLA_FFI_DEFINE_HANDLER_SYMBOL(lk_jax_rescale_##T, handle_rescale<lk_rescale_##T>,                                   \
                                  BIND_RESCALE.Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>(),     \
                                  TRAITS);                                                                              \
    FUNCTION(logsumexp, forward, T, nullptr)                                                                            \
    FUNCTION(logsumexp, backward, T, nullptr)                                                                           \
    FUNCTION(cross_entropy, forward, T, nullptr)                                                                        \
    FUNCTION(cross_entropy, backward, T, nullptr)                                                                       \
    FUNCTION(cross_entropy, forward_backward, T, nullptr)                                                               \
    FUNCTION(cross_entropy_parallel, forward, T, nullptr)                                                               \
    FUNCTION(cross_entropy_parallel, finish, T, nullptr)                                                                \
    FUNCTION(cross_entropy_parallel, backward, T, nullptr)                                                              \
    FUNCTION(cross_entropy_ids, forward, T, nullptr)                                                                    \
    FUNCTION(cross_entropy_ids, backward, T, nullptr)                                                                   \
    FUNCTION(cross_entropy_ids_parallel, forward, T, nullptr)                                                           \
    FUNCTION(cross_entropy_ids_parallel, finish, T, nullptr)                                                            \
    FUNCTION(cross_entropy_ids_parallel, backward, T, nullptr)                                                          \
    FUNCTION(kl, forward, T, nullptr)                                                                                   \
    FUNCTION(kl, backward, T, nullptr)                                                                                  \
    FUNCTION(kl_parallel, forward, T, nullptr)                                                                          \
    FUNCTION(kl_parallel, between, T, nullptr)                                                                          \
    FUNCTION(kl_parallel, finish, T, nullptr)                                                                           \
    FUNCTION(kl_parallel, backward, T, nullptr)                                                                         \
    FUNCTION(linear_cross_entropy, forward, T, lk_linear_cross_entropy_forward_plan_##T)                                \
    FUNCTION(linear_cross_entropy, backward, T, lk_linear_cross_entropy_backward_plan_##T)                              \
    FUNCTION(linear_cross_entropy, forward_backward, T, lk_linear_cross_entropy_forward_backward_plan_##T)              \
    FUNCTION(linear_cross_entropy_parallel, forward, T, lk_linear_cross_entropy_parallel_forward_plan_##T)              \
    FUNCTION(linear_cross_entropy_parallel, backward, T, lk_linear_cross_entropy_parallel_backward_plan_##T)            \
    FUNCTION(linear_cross_entropy_parallel, finish, T, nullptr)                                                         \
    FUNCTION(linear_cross_entropy_ids, forward, T, lk_linear_cross_entropy_ids_forward_plan_##T)                        \
    FUNCTION(linear_cross_entropy_ids, backward, T, lk_linear_cross_entropy_ids_backward_plan_##T)                      \
    FUNCTION(linear_cross_entropy_ids_parallel, forward, T, lk_linear_cross_entropy_ids_parallel_forward_plan_##T)      \
    FUNCTION(linear_cross_entropy_ids_parallel, finish, T, nullptr)                                                     \
    FUNCTION(linear_cross_entropy_ids_parallel, backward, T, lk_linear_cross_entropy_ids_parallel_backward_plan_##T)    \
    FUNCTION(linear_kl, forward, T, lk_linear_kl_forward_plan_##T)                                                      \
    FUNCTION(linear_kl, backward, T, lk_linear_kl_backward_plan_##T)                                                    \
    FUNCTION(linear_kl, forward_backward, T, lk_linear_kl_forward_backward_plan_##T)                                    \
    FUNCTION(linear_kl_parallel, forward, T, lk_linear_kl_parallel_forward_plan_##T)                                    \
    FUNCTION(linear_kl_parallel, between, T, lk_linear_kl_parallel_between_plan_##T)                                    \
    FUNCTION(linear_kl_parallel, finish, T, nullptr)                                                                    \
    FUNCTION(linear_kl_parallel, backward, T, lk_linear_kl_parallel_backward_plan_##T)                                  \
    FUNCTION(linear_support, forward, T, nullptr)                                                                       \
    FUNCTION(linear_support, backward, T, nullptr)                                                                      \
    FUNCTION(linear_topk, forward, T, lk_linear_topk_forward_plan_##T)                                                  \
    FUNCTION(glu, forward, T, nullptr)                                                                                  \
    FUNCTION(glu, backward, T, nullptr)                                                                                 \
    FUNCTION(rope, forward, T, nullptr)                                                                                 \
    FUNCTION(rope, backward, T, nullptr)                                                                                \
    FUNCTION(md_lrpe_cosine, forward, T, nullptr)                                                                       \
    FUNCTION(md_lrpe_cosine, backward, T, nullptr)                                                                      \
    FUNCTION(srms_norm, forward, T, nullptr)                                                                            \
    FUNCTION(srms_norm, backward, T, nullptr)                                                                           \
    FUNCTION(srms_norm_fp8, forward, T, nullptr)                                                                        \
    FUNCTION(srms_norm_gated, forward, T, nullptr)                                                                      \
    FUNCTION(srms_norm_gated, backward, T, nullptr)

FUNCTIONS(f32)
FUNCTIONS(f16)
FUNCTIONS(bf16)

extern "C" const char *lk_jax_platform(void) { return PLATFORM; }
extern "C" const char *lk_jax_functions(void) { return functions().c_str(); }
extern "C" const char *lk_jax_last_error(void) { return lk_last_error(); }

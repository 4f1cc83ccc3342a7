// SPDX-License-Identifier: MIT
/* tests/arguments.cpp - what lk/README.md says of calls that fail, for every function and any values in its struct. tests/check
 * runs it on the simulator, with UBSan. Nobody owns the addresses of tensors: what reads or writes one on the host ends the program.
 *
 *   fuzz    a few fields of a good call get values from a list: a call that returns LK_ERR_NULL to LK_ERR_WORKSPACE has launched
 *           nothing and called no callback, and its sentence names it; a query or a plan that fails has written nothing
 *   pairs   two fields that are wrong by themselves: the status is that of the earlier rule
 *   spaces  an output in another tensor, or a tensor in the workspace: LK_ERR_SHAPE
 *   soon    a call of millions of chunks, slices or panels comes to its first launch
 *
 * Calls are captured into a graph, whose nodes are the launches. Where sizes are large, that capture is spoilt before, so that the
 * first launch fails: no call has time to launch them all.
 *
 *   ./arguments [COUNT [SEED]]       COUNT: of the fuzz, for each function
 */
#include "lk/cross_entropy_ids_parallel.cuh"
#include "lk/cross_entropy_probabilities.cuh"
#include "lk/glu.cuh"
#include "lk/linear_cross_entropy_ids_parallel.cuh"
#include "lk/linear_cross_entropy_probabilities.cuh"
#include "lk/linear_kl_parallel.cuh"
#include "lk/lk_scale.cuh"
#include "lk/linear_support.cuh"
#include "lk/linear_topk.cuh"
#include "lk/logsumexp.cuh"
#include "lk/md_lrpe_cosine.cuh"
#include "lk/rope.cuh"
#include "lk/srms_norm_fp8.cuh"
#include "lk/srms_norm_gated.cuh"

#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

#include <string>
#include <type_traits>
#include <vector>

LK_DEFINE_CROSS_ENTROPY(f32)
LK_DEFINE_CROSS_ENTROPY_PARALLEL(f32)
LK_DEFINE_CROSS_ENTROPY_PROBABILITIES(f32)
LK_DEFINE_CROSS_ENTROPY_IDS(f32)
LK_DEFINE_CROSS_ENTROPY_IDS_PARALLEL(f32)
LK_DEFINE_KL(f32)
LK_DEFINE_KL_PARALLEL(f32)
LK_DEFINE_LINEAR_CROSS_ENTROPY(f32)
LK_DEFINE_LINEAR_CROSS_ENTROPY_PARALLEL(f32)
LK_DEFINE_LINEAR_CROSS_ENTROPY_IDS(f32)
LK_DEFINE_LINEAR_CROSS_ENTROPY_IDS_PARALLEL(f32)
LK_DEFINE_LINEAR_CROSS_ENTROPY(bf16)
LK_DEFINE_LINEAR_CROSS_ENTROPY_PARALLEL(bf16)
LK_DEFINE_LINEAR_CROSS_ENTROPY_IDS(bf16)
LK_DEFINE_LINEAR_CROSS_ENTROPY_PROBABILITIES(f32)
LK_DEFINE_LINEAR_CROSS_ENTROPY_PROBABILITIES(bf16)
LK_DEFINE_LINEAR_KL(f32)
LK_DEFINE_LINEAR_KL_PARALLEL(f32)
LK_DEFINE_GLU(f32)
LK_DEFINE_LINEAR_SUPPORT(f32)
LK_DEFINE_LINEAR_TOPK(f32)
LK_DEFINE_LOGSUMEXP(f32)
LK_DEFINE_MD_LRPE_COSINE(f32)
LK_DEFINE_SCALE(f32)
LK_DEFINE_ROPE(f32)
LK_DEFINE_SRMS_NORM(f32)
LK_DEFINE_SRMS_NORM_FP8(f32)
LK_DEFINE_SRMS_NORM_GATED(f32)

/* ---- The fields of the structs ------------------------------------------------------------------------------------------- */

enum { POINTER, WORKSPACE, BYTES, SIZE, INT, FLOAT, CALLBACK };
typedef struct {
    std::string name;
    size_t at;
    int kind;
    bool out; /* a pointer to memory that is not const */
} field;
typedef std::vector<field> fields;

template <class F> static int kind_of(const char *name)
{
    if (!strcmp(name, "workspace")) return WORKSPACE;
    if (std::is_same<F, size_t>::value) return BYTES;
    if (std::is_pointer<F>::value) return std::is_function<typename std::remove_pointer<F>::type>::value ? CALLBACK : POINTER;
    return std::is_same<typename std::remove_extent<F>::type, int64_t>::value ? SIZE : std::is_same<F, float>::value ? FLOAT : INT;
}

/* Those of a struct that lies at `at` in another. */
static fields within(const std::string &name, size_t at, fields list)
{
    for (field &f : list) f.name = name + "." + f.name, f.at += at;
    return list;
}
static fields operator+(fields a, const fields &b)
{
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

#define F(name)                                                                                                                \
    {#name, offsetof(S, name), kind_of<decltype(S::name)>(#name),                                                              \
     !std::is_const<std::remove_pointer<decltype(S::name)>::type>::value}
#define WITHIN(name, list) within(#name, offsetof(S, name), list)
typedef lk_vocab_parallel S;
static const fields parallel = {F(vocab_start), F(vocab_total), F(rank), F(ranks), F(all_gather), F(reduce_sms)};
/* A struct of ranks: `common` is of an op's fields. */
#define RANKS_OF(list) fields{F(states), F(all_states)} + WITHIN(common, list) + WITHIN(parallel, parallel)
#define S lk_cross_entropy_args
static const fields of_cross_entropy = {
    F(logits), F(target), F(target_prob), F(class_weight), F(row_weight), F(upstream), F(dlse), F(dentropy), F(denominator),
    F(loss), F(z_loss_out), F(lse), F(lse_low), F(entropy), F(argmax), F(valid_rows), F(weight_sum), F(dlogits),
    F(bad_targets), F(workspace), F(workspace_bytes), F(rows), F(vocab), F(logits_stride), F(target_prob_stride),
    F(dlogits_stride), F(ignore_index), F(logit_scale), F(softcap), F(label_smoothing), F(z_loss), F(use_ignore_index),
    F(reduction), F(zero_when_empty), F(upstream_per_row), F(zero_padding), F(dlogits_dtype), F(target_dtype),
    F(target_prob_dtype), F(path), F(statistics), F(batch_invariant)};
#undef S
#define S lk_cross_entropy_parallel_args
static const fields of_cross_entropy_parallel = RANKS_OF(of_cross_entropy);
#undef S
#define S lk_cross_entropy_ids_args
static const fields of_cross_entropy_ids = fields{
    F(target_ids), F(target_weight), F(dlogp), F(logp), F(ids_per_row), F(target_ids_stride), F(target_weight_stride),
    F(dlogp_stride), F(logp_stride), F(tail_weight), F(dtail), F(tail)} + WITHIN(common, of_cross_entropy);
#undef S
#define S lk_cross_entropy_ids_parallel_args
static const fields of_cross_entropy_ids_parallel = RANKS_OF(of_cross_entropy_ids);
#undef S
#define S lk_kl_args
static const fields of_kl = {
    F(logits), F(teacher), F(row_weight), F(upstream), F(loss), F(lse), F(teacher_lse), F(entropy), F(dlogits),
    F(workspace), F(workspace_bytes), F(rows), F(vocab), F(logits_stride), F(teacher_stride), F(dlogits_stride),
    F(logit_scale), F(teacher_scale), F(softcap), F(teacher_softcap), F(beta), F(divergence), F(upstream_per_row), F(path),
    F(batch_invariant)};
#undef S
#define S lk_kl_parallel_args
static const fields of_kl_parallel = RANKS_OF(of_kl);
#undef S
#define S lk_linear_cross_entropy_args
static const fields of_linear_cross_entropy = {
    F(context), F(x), F(weight), F(bias), F(target), F(class_weight), F(row_weight), F(upstream), F(dlse), F(dentropy),
    F(denominator), F(loss), F(z_loss_out), F(lse), F(lse_low), F(entropy), F(argmax), F(valid_rows), F(weight_sum),
    F(saved), F(bad_targets), F(dx), F(dweight), F(dbias), F(workspace), F(workspace_bytes), F(tokens), F(hidden), F(vocab),
    F(x_stride), F(weight_stride), F(dx_stride), F(dweight_stride), F(ignore_index), F(max_counted), F(chunk_tokens),
    F(panel_vocab), F(slice_tokens), F(logit_scale), F(softcap), F(label_smoothing), F(z_loss), F(use_ignore_index),
    F(reduction), F(zero_when_empty), F(upstream_per_token), F(accumulate), F(target_dtype), F(bias_dtype),
    F(dweight_dtype), F(dbias_dtype), F(fast_logits), F(tf32), F(batch_invariant), F(path), F(statistics)};
#undef S
#define S lk_linear_cross_entropy_parallel_args
static const fields of_linear_cross_entropy_parallel = RANKS_OF(of_linear_cross_entropy);
#undef S
#define S lk_linear_cross_entropy_ids_args
static const fields of_linear_cross_entropy_ids = fields{
    F(target_ids), F(target_weight), F(dlogp), F(logp), F(ids_per_row), F(target_ids_stride), F(target_weight_stride),
    F(dlogp_stride), F(logp_stride), F(tail_weight), F(dtail), F(tail)} + WITHIN(common, of_linear_cross_entropy);
#undef S
#define S lk_linear_cross_entropy_probabilities_args
static const fields of_linear_cross_entropy_probabilities = fields{
    F(target_prob), F(target_prob_stride), F(target_prob_dtype)} + WITHIN(common, of_linear_cross_entropy);
#undef S
#define S lk_linear_cross_entropy_ids_parallel_args
static const fields of_linear_cross_entropy_ids_parallel = RANKS_OF(of_linear_cross_entropy_ids);
#undef S
#define S lk_linear_kl_args
static const fields of_linear_kl = {
    F(context), F(x), F(weight), F(bias), F(teacher_x), F(teacher_weight), F(teacher_bias), F(row_weight), F(upstream),
    F(loss), F(lse), F(teacher_lse), F(entropy), F(dx), F(dweight), F(dbias), F(workspace), F(workspace_bytes), F(tokens),
    F(hidden), F(teacher_hidden), F(vocab), F(x_stride), F(weight_stride), F(teacher_x_stride), F(teacher_weight_stride),
    F(dx_stride), F(dweight_stride), F(chunk_tokens), F(slice_tokens), F(logit_scale), F(teacher_scale), F(softcap),
    F(teacher_softcap), F(beta), F(divergence), F(upstream_per_token), F(accumulate), F(dweight_dtype), F(fast_logits),
    F(tf32), F(max_counted)};
#undef S
#define S lk_linear_kl_parallel_args
static const fields of_linear_kl_parallel = RANKS_OF(of_linear_kl);
#undef S
#define S lk_linear_topk_args
static const fields of_linear_topk = {
    F(context), F(x), F(weight), F(bias), F(ids), F(logp), F(lse), F(score), F(seed), F(offset), F(workspace), F(workspace_bytes), F(tokens), F(hidden),
    F(vocab), F(x_stride), F(weight_stride), F(chunk_tokens), F(vocab_start), F(logit_scale), F(softcap), F(k), F(ids_dtype), F(tf32)};
#undef S
#define S lk_linear_support_args
static const fields of_linear_support = {
    F(x), F(weight), F(full_logits), F(bias), F(offsets), F(ids), F(target), F(teacher_logp), F(logits), F(logp), F(lse), F(entropy),
    F(kl), F(support_logp), F(bad_targets), F(dlogp), F(dlse), F(dentropy), F(dkl), F(dsupport_logp), F(dx), F(dweight), F(dbias),
    F(dfull_logits), F(dweight_ids), F(dweight_rows), F(workspace), F(workspace_bytes), F(tokens), F(hidden), F(vocab), F(entries),
    F(x_stride), F(weight_stride), F(dx_stride), F(dweight_stride), F(full_logits_stride), F(dfull_logits_stride), F(vocab_start),
    F(vocab_total), F(ignore_index), F(logit_scale), F(softcap), F(logits_given), F(use_ignore_index), F(accumulate), F(offsets_dtype),
    F(target_dtype), F(bias_dtype), F(dweight_dtype), F(dbias_dtype)};
#undef S
#define S lk_glu_args
static const fields of_glu = {
    F(gate), F(up), F(y), F(dy), F(dgate), F(dup), F(row_weight), F(drow_weight), F(rows), F(cols), F(gate_stride), F(up_stride),
    F(y_stride), F(dy_stride), F(dgate_stride), F(dup_stride), F(activation), F(interleaved), F(alpha), F(limit), F(up_offset)};
#undef S
#define S lk_logsumexp_args
static const fields of_logsumexp = {
    F(x), F(lse), F(lse_low), F(lse_rounded), F(dlse), F(dx), F(outer), F(cols), F(inner), F(outer_stride), F(col_stride),
    F(dx_outer_stride), F(dx_col_stride), F(scale), F(path), F(dlse_rounded)};
#undef S
#define S lk_md_lrpe_cosine_args
static const fields of_md_lrpe_cosine = {
    F(x), F(theta), F(offset_device), F(y), F(dy), F(dx), F(dtheta), F(workspace), F(workspace_bytes), F(batch), F(heads),
    F(dim), F(e), F(theta_heads), F(theta_features), F(prefix), F(axes), F(shape), F(offset), F(x_batch_stride),
    F(x_head_stride), F(x_token_stride), F(y_batch_stride), F(y_head_stride), F(y_token_stride), F(dy_batch_stride),
    F(dy_head_stride), F(dy_token_stride), F(dx_batch_stride), F(dx_head_stride), F(dx_token_stride), F(theta_dtype),
    F(activation), F(accumulate), F(path)};
#undef S
#define S lk_rescale_args
static const fields of_rescale = {F(x), F(y), F(count), F(factor), F(divisor), F(history)};
#undef S
#define S lk_rope_args
static const fields of_rope = {
    F(q), F(k), F(q_out), F(k_out), F(dq_out), F(dk_out), F(dq), F(dk), F(position), F(inv_freq), F(pair_axis), F(cos), F(sin),
    F(q_weight), F(k_weight), F(q_rstd), F(k_rstd), F(dq_weight), F(dk_weight), F(workspace), F(workspace_bytes), F(batch),
    F(tokens), F(q_heads), F(k_heads), F(dim), F(rotary), F(offset), F(q_stride), F(k_stride), F(q_out_stride),
    F(k_out_stride), F(dq_out_stride), F(dk_out_stride), F(dq_stride), F(dk_stride), F(table_stride), F(table_step),
    F(shared_positions), F(axes), F(interleaved), F(position_dtype), F(table_dtype), F(weight_dtype), F(accumulate), F(scale),
    F(eps), F(weight_offset)};
#undef S
#define S lk_srms_norm_args
static const fields of_srms_norm = {
    F(x), F(residual), F(residual_out), F(rstd), F(weight), F(bias), F(y), F(dy), F(dresidual_out), F(dx), F(dresidual),
    F(dweight), F(dbias), F(workspace), F(workspace_bytes), F(rows), F(cols), F(groups), F(x_stride), F(residual_stride),
    F(residual_out_stride), F(y_stride), F(dy_stride), F(dresidual_out_stride), F(dx_stride), F(dresidual_stride), F(eps),
    F(weight_offset), F(residual_dtype), F(weight_dtype), F(dweight_dtype), F(accumulate), F(path), F(dy_dtype),
    F(batch_invariant)};
#undef S
#define S lk_srms_norm_fp8_args
static const fields of_srms_norm_fp8 = fields{
    F(tensor_scale), F(amax), F(q), F(scale), F(q_transposed), F(transposed_scale), F(q_stride), F(scale_stride),
    F(scale_block_stride), F(q_transposed_stride), F(transposed_scale_stride), F(transposed_block_stride), F(scaling),
    F(format), F(power_of_two)} +
    WITHIN(common, of_srms_norm);
#undef S
#define S lk_srms_norm_gated_args
static const fields of_srms_norm_gated =
    fields{F(gate), F(dgate), F(gate_stride), F(dgate_stride), F(gate_first)} + WITHIN(common, of_srms_norm);
#undef S

/* ---- The functions ------------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *name, *query_name, *plan_name;
    lk_status (*run)(const void *args, cudaStream_t stream);
    lk_status (*query)(const void *args, size_t *bytes);          /* NULL: there is none */
    lk_status (*plan)(const void *args, size_t budget, void *plan); /* likewise */
    size_t plan_bytes;
    const fields *list;
    const char *good; /* what the fields of a good call hold: numbers, and 0 of a pointer that is NULL. Other pointers are given,
                       * all other numbers are 0 */
} function;

#define RUN(name, type) [](const void *a, cudaStream_t s) { return name((const type *)a, s); }
#define CALL(op, direction, T, good)                                                                                           \
    {"lk_" #op "_" #direction "_" #T, "lk_" #op "_" #direction "_workspace_bytes_" #T, "",                                     \
     RUN(lk_##op##_##direction##_##T, lk_##op##_args),                                                                         \
     [](const void *a, size_t *n) { return lk_##op##_##direction##_workspace_bytes_##T((const lk_##op##_args *)a, n); }, NULL, 0, \
     &of_##op, good}
#define PLANNED(op, direction, T, plan_op, good)                                                                               \
    {"lk_" #op "_" #direction "_" #T, "lk_" #op "_" #direction "_workspace_bytes_" #T, "lk_" #op "_" #direction "_plan_" #T,   \
     RUN(lk_##op##_##direction##_##T, lk_##op##_args),                                                                         \
     [](const void *a, size_t *n) { return lk_##op##_##direction##_workspace_bytes_##T((const lk_##op##_args *)a, n); },       \
     [](const void *a, size_t budget, void *plan) {                                                                            \
         return lk_##op##_##direction##_plan_##T((const lk_##op##_args *)a, budget, (lk_##plan_op##_plan *)plan); },           \
     sizeof(lk_##plan_op##_plan), &of_##op, good}

#define CE "rows=6 vocab=40 target_prob=0 "
#define PROB "rows=6 vocab=40 target=0 "
#define IDS "ids_per_row=3 common.rows=6 common.vocab=40 common.target=0 common.target_prob=0 common.class_weight=0 "
#define KL "rows=6 vocab=40 "
#define LCE "tokens=6 hidden=16 vocab=40 saved=0 "
#define LCE_SMALL "hidden=8 saved=0 "
#define LCE_IDS "ids_per_row=3 common.tokens=6 common.hidden=16 common.vocab=40 common.target=0 common.class_weight=0 "        \
                "common.saved=0 "
#define LCE_PROB "common.tokens=6 common.hidden=16 common.vocab=40 common.target=0 common.saved=0 "
#define LKL "tokens=6 hidden=16 vocab=40 "
#define TOPK "tokens=6 hidden=16 vocab=40 k=5 "
#define SUPPORT "tokens=6 hidden=16 vocab=40 entries=30 "
#define ROPE "batch=2 tokens=3 q_heads=2 k_heads=1 dim=16 "
/* Of ranks, with GATHERS a call with a collective of its own. */
#define RANKS "parallel.vocab_total=80 parallel.ranks=2 "
#define GATHERS RANKS "all_states=0 parallel.all_gather=1 "
#define CE_RANKS "common.rows=6 common.vocab=40 common.target_prob=0 "
#define IDS_RANKS "common.ids_per_row=3 common.common.rows=6 common.common.vocab=40 common.common.target=0 "                   \
                  "common.common.target_prob=0 common.common.class_weight=0 "
#define KL_RANKS "common.rows=6 common.vocab=40 "
#define LCE_RANKS "common.tokens=6 common.hidden=16 common.vocab=40 common.saved=0 "
#define LCE_IDS_RANKS "common.ids_per_row=3 common.common.tokens=6 common.common.hidden=16 common.common.vocab=40 "            \
                      "common.common.target=0 common.common.class_weight=0 common.common.saved=0 "
#define LKL_RANKS "common.tokens=6 common.hidden=16 common.vocab=40 "
#define NORM "common.rows=6 common.cols=128 common.bias=0 "

static const function functions[] = {
    CALL(cross_entropy, forward, f32, CE "reduction=1"),
    CALL(cross_entropy, backward, f32, CE),
    CALL(cross_entropy, backward, f32, CE "reduction=1"),
    CALL(cross_entropy, forward_backward, f32, CE "reduction=1"),
    CALL(cross_entropy, probabilities_forward, f32, PROB),
    CALL(cross_entropy, probabilities_backward, f32, PROB),
    CALL(cross_entropy, probabilities_forward_backward, f32, PROB),
    CALL(cross_entropy_parallel, forward, f32, CE_RANKS RANKS),
    CALL(cross_entropy_parallel, forward, f32, CE_RANKS GATHERS),
    CALL(cross_entropy_parallel, backward, f32, CE_RANKS RANKS),
    CALL(cross_entropy_parallel, forward_backward, f32, CE_RANKS GATHERS "states=0 common.reduction=1"),
    CALL(cross_entropy_parallel, finish, f32, CE_RANKS RANKS "common.reduction=2"),
    CALL(cross_entropy_ids, forward, f32, IDS),
    CALL(cross_entropy_ids, backward, f32, IDS),
    CALL(cross_entropy_ids, forward_backward, f32, IDS),
    CALL(cross_entropy_ids_parallel, forward, f32, IDS_RANKS RANKS),
    CALL(cross_entropy_ids_parallel, forward, f32, IDS_RANKS GATHERS "states=0"),
    CALL(cross_entropy_ids_parallel, backward, f32, IDS_RANKS RANKS),
    CALL(cross_entropy_ids_parallel, forward_backward, f32, IDS_RANKS GATHERS),
    CALL(cross_entropy_ids_parallel, finish, f32, IDS_RANKS RANKS),
    CALL(kl, forward, f32, KL),
    CALL(kl, backward, f32, KL),
    CALL(kl, forward_backward, f32, KL),
    CALL(kl_parallel, forward, f32, KL_RANKS GATHERS "states=0"),
    CALL(kl_parallel, between, f32, KL_RANKS RANKS "common.divergence=2"),
    CALL(kl_parallel, finish, f32, KL_RANKS RANKS),
    CALL(kl_parallel, backward, f32, KL_RANKS RANKS),
    CALL(kl_parallel, forward_backward, f32, KL_RANKS GATHERS "common.divergence=2"),
    PLANNED(linear_cross_entropy, forward, f32, linear_cross_entropy, LCE),
    PLANNED(linear_cross_entropy, forward, f32, linear_cross_entropy, "tokens=6 hidden=16 vocab=40"),
    PLANNED(linear_cross_entropy, backward, f32, linear_cross_entropy, LCE),
    PLANNED(linear_cross_entropy, forward_backward, f32, linear_cross_entropy, LCE "reduction=1"),
    PLANNED(linear_cross_entropy, forward, bf16, linear_cross_entropy, LCE "path=3"),
    PLANNED(linear_cross_entropy, forward_backward, bf16, linear_cross_entropy, LCE "path=3"),
    PLANNED(linear_cross_entropy_parallel, forward, f32, linear_cross_entropy, LCE_RANKS RANKS),
    PLANNED(linear_cross_entropy_parallel, forward, f32, linear_cross_entropy, LCE_RANKS GATHERS),
    PLANNED(linear_cross_entropy_parallel, backward, f32, linear_cross_entropy, LCE_RANKS RANKS),
    PLANNED(linear_cross_entropy_parallel, forward_backward, f32, linear_cross_entropy, LCE_RANKS GATHERS "states=0"),
    PLANNED(linear_cross_entropy_parallel, forward_backward, bf16, linear_cross_entropy, LCE_RANKS GATHERS "common.path=3"),
    CALL(linear_cross_entropy_parallel, finish, f32, LCE_RANKS RANKS "common.reduction=2"),
    PLANNED(linear_cross_entropy_ids, forward, f32, linear_cross_entropy, LCE_IDS),
    PLANNED(linear_cross_entropy_ids, backward, f32, linear_cross_entropy, LCE_IDS),
    PLANNED(linear_cross_entropy_ids, forward_backward, f32, linear_cross_entropy, LCE_IDS),
    PLANNED(linear_cross_entropy_ids, backward, bf16, linear_cross_entropy,
            LCE_IDS "common.path=3 tail_weight=0 dtail=0 tail=0"),
    PLANNED(linear_cross_entropy_ids_parallel, forward, f32, linear_cross_entropy, LCE_IDS_RANKS RANKS),
    PLANNED(linear_cross_entropy_ids_parallel, forward, f32, linear_cross_entropy, LCE_IDS_RANKS GATHERS "states=0"),
    PLANNED(linear_cross_entropy_ids_parallel, backward, f32, linear_cross_entropy, LCE_IDS_RANKS RANKS),
    PLANNED(linear_cross_entropy_ids_parallel, forward_backward, f32, linear_cross_entropy, LCE_IDS_RANKS GATHERS),
    CALL(linear_cross_entropy_ids_parallel, finish, f32, LCE_IDS_RANKS RANKS),
    PLANNED(linear_cross_entropy_probabilities, forward, f32, linear_cross_entropy, LCE_PROB),
    PLANNED(linear_cross_entropy_probabilities, backward, f32, linear_cross_entropy, LCE_PROB),
    PLANNED(linear_cross_entropy_probabilities, forward_backward, bf16, linear_cross_entropy, LCE_PROB "common.fast_logits=1"),
    PLANNED(linear_kl, forward, f32, linear_kl, LKL),
    PLANNED(linear_kl, backward, f32, linear_kl, LKL),
    PLANNED(linear_kl, forward_backward, f32, linear_kl, LKL),
    PLANNED(linear_kl_parallel, forward, f32, linear_kl, LKL_RANKS GATHERS "states=0"),
    PLANNED(linear_kl_parallel, between, f32, linear_kl, LKL_RANKS RANKS "common.divergence=2"),
    PLANNED(linear_kl_parallel, backward, f32, linear_kl, LKL_RANKS RANKS),
    PLANNED(linear_kl_parallel, forward_backward, f32, linear_kl, LKL_RANKS GATHERS "states=0"),
    CALL(linear_kl_parallel, finish, f32, LKL_RANKS RANKS),
    CALL(linear_support, forward, f32, SUPPORT "full_logits=0"),
    CALL(linear_support, forward, f32, SUPPORT "logits_given=1 x=0 weight=0 full_logits=0"),
    CALL(linear_support, forward, f32, SUPPORT "hidden=0 x=0 weight=0 bias=0"),
    CALL(linear_support, backward, f32, SUPPORT "dfull_logits=0 dweight_ids=0 dweight_rows=0"),
    CALL(linear_support, backward, f32, SUPPORT "dfull_logits=0"),
    CALL(linear_support, backward, f32, SUPPORT "hidden=0 dx=0 dweight=0 dbias=0 dweight_ids=0 dweight_rows=0"),
    PLANNED(linear_topk, forward, f32, linear_topk, TOPK),
    CALL(glu, forward, f32, "rows=6 cols=40"),
    CALL(glu, backward, f32, "rows=6 cols=40"),
    CALL(glu, backward, f32, "rows=6 cols=40 interleaved=1 up=0 dup=0"),
    CALL(logsumexp, forward, f32, "outer=6 cols=40"),
    CALL(logsumexp, backward, f32, "outer=6 cols=40 dlse_rounded=0"),
    CALL(md_lrpe_cosine, forward, f32, "batch=2 heads=2 dim=16 axes=1 shape=5"),
    CALL(md_lrpe_cosine, forward, f32, "batch=2 heads=2 dim=16 axes=1 shape=5 activation=5"),
    CALL(md_lrpe_cosine, backward, f32, "batch=2 heads=2 dim=16 axes=1 shape=5"),
    CALL(rope, forward, f32, ROPE "cos=0 sin=0"),
    CALL(rope, forward, f32, ROPE "inv_freq=0 position=0 pair_axis=0 q_weight=0 k_weight=0 q_rstd=0 k_rstd=0"),
    CALL(rope, backward, f32, ROPE "cos=0 sin=0"),
    CALL(rope, backward, f32, ROPE "inv_freq=0 position=0 pair_axis=0 q_weight=0 k_weight=0 dq_weight=0 dk_weight=0"),
    CALL(srms_norm, forward, f32, "rows=6 cols=40"),
    CALL(srms_norm, backward, f32, "rows=6 cols=40 residual_out=0"),
    CALL(srms_norm_gated, forward, f32, NORM "common.residual=0 common.residual_out=0 common.bias=0"),
    CALL(srms_norm_gated, backward, f32, NORM "common.residual=0 common.residual_out=0 common.dresidual=0 common.dresidual_out=0 "
                                              "common.dbias=0 gate_first=1"),
    CALL(srms_norm_fp8, forward, f32, NORM "scale=0 transposed_scale=0"),
    CALL(srms_norm_fp8, forward, f32, NORM "tensor_scale=0 amax=0 scaling=2"),
    {"lk_rescale_f32", "", "", RUN(lk_rescale_f32, lk_rescale_args), NULL, NULL, 0, &of_rescale, "count=6"},
};

/* ---- A call -------------------------------------------------------------------------------------------------------------- */

enum { ARGS = 1024, PLAN = 1024 };
typedef struct {
    alignas(16) unsigned char bytes[ARGS];
} arguments;

static lk_linear_cross_entropy_context context;
static lk_linear_kl_context kl_context;
static lk_linear_topk_context topk_context;
static cudaStream_t stream;
static int called_back;
static long failed, calls;
static uint64_t state;

typedef lk_status gathers(void *, const void *, void *, size_t, cudaStream_t);
static lk_status gather(void *, const void *, void *, size_t, cudaStream_t) { return called_back++, LK_OK; }

static size_t random_below(size_t n)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (size_t)(state >> 11) % n;
}

/* The field's name without those of the structs that it lies in. */
static std::string last(const field &f) { return f.name.substr(f.name.rfind('.') + 1); }
static bool is_one_of(const std::string &name, const char *list)
{
    return (" " + std::string(list) + " ").find(" " + name + " ") != std::string::npos;
}

template <class E> static E *place(arguments *a, const field &f) { return (E *)(a->bytes + f.at); }
static void put(arguments *a, const field &f, int64_t number)
{
    if (f.kind == SIZE) *place<int64_t>(a, f) = number;
    else if (f.kind == INT) *place<int>(a, f) = (int)number;
    else if (f.kind == CALLBACK) *place<gathers *>(a, f) = number ? gather : NULL;
    else if (f.kind == BYTES) *place<size_t>(a, f) = (size_t)number;
    else *place<uintptr_t>(a, f) = (uintptr_t)number;
}

/* The memory of a tensor: 2^36 bytes from 2^44 on. */
static int64_t address(size_t i) { return (int64_t)((1 << 8) + i) << 36; }

static arguments good_of(const function &f)
{
    arguments a = {};
    for (size_t i = 0; i < f.list->size(); i++) {
        const field &x = (*f.list)[i];
        if (x.kind == POINTER || x.kind == WORKSPACE) put(&a, x, address(i));
        if (x.kind == BYTES) put(&a, x, 1 << 30);
        if (last(x) == "context") put(&a, x, (int64_t)(strstr(f.name, "linear_kl")     ? (uintptr_t)&kl_context
                                                         : strstr(f.name, "linear_topk") ? (uintptr_t)&topk_context
                                                                                         : (uintptr_t)&context));
        if (is_one_of(last(x), "eps beta")) *place<float>(&a, x) = 0.5f;
        const std::string text = " " + std::string(f.good) + " ";
        const size_t at = text.find(" " + x.name + "=");
        if (at != std::string::npos) put(&a, x, atoll(text.c_str() + at + x.name.size() + 2));
    }
    return a;
}

static void complain(const function &f, const char *what, const std::string &changed, lk_status status)
{
    if (failed++ < 40) printf("%s with %s: %s; status %d, %s\n", f.name, changed.c_str(), what, status, lk_last_error());
}

static bool is_refusal(lk_status status) { return status <= LK_ERR_NULL && status >= LK_ERR_WORKSPACE; }
static void expect_name(const function &f, const char *name, const std::string &changed, lk_status status)
{
    if (strncmp(lk_last_error(), name, strlen(name)) || lk_last_error()[strlen(name)] != ':')
        complain(f, "the sentence names another function", changed, status);
}

/* The status of a call, and of its queries if they are asked too. changed: what is not as in the good call. */
static lk_status call(const function &f, const arguments &a, const std::string &changed, bool ask)
{
    arguments given = a;
    bool large = false;
    for (const field &x : *f.list) large = large || (x.kind == SIZE && *place<int64_t>(&given, x) > 200);
    cudaGraph_t graph = NULL;
    size_t launches = 0;
    called_back = 0, calls++;
    (void)cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    if (large) (void)cudaFree(NULL);
    const lk_status status = f.run(&given, stream);
    if (is_refusal(status)) expect_name(f, f.name, changed, status);
    if (!cudaStreamEndCapture(stream, &graph) && graph) (void)cudaGraphGetNodes(graph, NULL, &launches);
    if (graph) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    if (is_refusal(status) && (launches || called_back)) complain(f, "it is refused after a launch or a callback", changed, status);
    if (ask && f.query) {
        size_t bytes = 12345;
        const lk_status asked = f.query(&given, &bytes);
        if (asked) expect_name(f, f.query_name, changed, asked);
        if ((bytes == 12345) != (asked != LK_OK)) complain(f, "a query writes its answer when it fails, or none", changed, asked);
        if (asked && !is_refusal(status)) complain(f, "its query is refused, and it is not", changed, asked);
    }
    if (ask && f.plan) {
        unsigned char plan[PLAN], before[PLAN];
        memset(plan, 0x5a, PLAN), memset(before, 0x5a, PLAN);
        const size_t budgets[] = {0, 1 << 12, 1 << 20, SIZE_MAX};
        const lk_status asked = f.plan(&given, budgets[random_below(4)], plan);
        if (asked) expect_name(f, f.plan_name, changed, asked);
        if (!memcmp(plan, before, PLAN) != (asked != LK_OK)) complain(f, "a refused plan is written, or one is not", changed, asked);
    }
    if (memcmp(&given, &a, sizeof a)) complain(f, "it writes its arguments", changed, status);
    return status;
}

/* ---- Fuzz ---------------------------------------------------------------------------------------------------------------- */

static std::string change(const function &f, arguments *a)
{
    static const int64_t sizes[] = {INT64_MIN, INT64_MIN + 1, -1, 0, 0, 1, 3, 7, 64, 129, 1 << 16, 1 << 24, 1 << 30,
                                    (1 << 30) + 1, INT32_MAX, (int64_t)1 << 31, (int64_t)1 << 38, (int64_t)1 << 40,
                                    (int64_t)1 << 58, (int64_t)1 << 61, (int64_t)1 << 62, INT64_MAX - 1, INT64_MAX};
    static const int ints[] = {INT_MIN, -1, 0, 1, 1, 2, 3, 4, 5, 6, 8, 99, INT_MAX};
    static const float floats[] = {NAN, INFINITY, -INFINITY, -1, 0, 1e-38f, 0.5f, 1, 30, 1e38f};
    const fields &list = *f.list;
    const field &x = list[random_below(list.size())];
    const size_t how = random_below(4), other = random_below(list.size());
    char text[64];
    if (x.kind == SIZE) put(a, x, sizes[random_below(LK_COUNT(sizes))]);
    if (x.kind == INT) put(a, x, ints[random_below(LK_COUNT(ints))]);
    if (x.kind == FLOAT) *place<float>(a, x) = floats[random_below(LK_COUNT(floats))];
    if (x.kind == CALLBACK) put(a, x, (int64_t)random_below(2));
    if (x.kind == BYTES) put(a, x, how == 3 ? -1 : how == 2 ? 1 << 20 : (int64_t)how);
    if (last(x) == "context") put(a, x, 0);
    else if (x.kind == POINTER || x.kind == WORKSPACE) {
        const size_t at = how == 1 ? other : (size_t)(&x - &list[0]);
        put(a, x, how == 0 ? 0 : address(at) + (how == 2));
    }
    if (x.kind == FLOAT) snprintf(text, sizeof text, " = %g ", *place<float>(a, x));
    else snprintf(text, sizeof text, " = %lld ", x.kind == INT ? *place<int>(a, x) : (long long)*place<int64_t>(a, x));
    return x.name + text;
}

static void fuzz(const function &f, long count)
{
    for (long i = 0; i < count; i++) {
        arguments a = good_of(f);
        std::string changed;
        for (size_t n = 1 + random_below(4); n > 0; n--) changed += change(f, &a);
        (void)call(f, a, changed, true);
    }
}

/* ---- Pairs of broken rules ----------------------------------------------------------------------------------------------- */

/* A field with a wrong value. */
typedef struct {
    size_t at;
    int64_t number;
    lk_status status;
    bool first; /* it is refused before all rules */
} wrong;

static void spoil(const function &f, arguments *a, const wrong &w)
{
    const field &x = (*f.list)[w.at];
    if (x.kind == FLOAT) *place<float>(a, x) = w.number ? -1.0f : NAN;
    else put(a, x, w.number);
}

/* Whether the pointer is NULL in the good call and not in this one, or the other way round. */
static bool changes_whether(const function &f, const wrong &w)
{
    arguments good = good_of(f);
    return (*place<uintptr_t>(&good, (*f.list)[w.at]) != 0) != (w.number != 0);
}

static std::string text_of(const function &f, const wrong &w)
{
    const field &x = (*f.list)[w.at];
    return x.name + " = " + (x.kind == FLOAT ? w.number ? "-1" : "NaN" : std::to_string(w.number)) + " ";
}

static std::vector<wrong> all_wrong(const function &f)
{
    const bool ids = strstr(f.name, "_ids_"), backward = strstr(f.name, "backward");
    std::vector<wrong> all;
    for (size_t i = 0; i < f.list->size(); i++) {
        const field &x = (*f.list)[i];
        const std::string name = last(x);
        const bool prob = strstr(f.name, "probabilities"), ranks = strstr(f.good, "vocab_total");
        const bool head_prob = prob && strstr(f.name, "linear");
        const bool first = x.name.find("parallel.") != std::string::npos || (name == "target_prob" && !prob) ||
                           (name == "vocab" && ranks) || (name == "statistics" && (backward || ids || prob)) ||
                           (prob && name == "batch_invariant") ||
                           (ids && is_one_of(name, "target class_weight label_smoothing saved batch_invariant")) ||
                           (ranks && (ids || strstr(f.name, "linear_kl")) && name == "max_counted") ||
                           (head_prob && is_one_of(name, "target saved max_counted batch_invariant target_prob_dtype")) ||
                           (strstr(f.name, "_gated_") &&
                            is_one_of(name, "residual residual_out bias dbias dresidual dresidual_out dy_dtype")) ||
                           (name == "divergence" && strstr(f.name, "between"));
        int64_t numbers[] = {0, address(i) + 1, address(0)};
        int count = name == "context" ? 1 : 3;
        if (x.kind == BYTES) numbers[0] = 1, count = 1;
        if (x.kind == SIZE) numbers[0] = -1, numbers[1] = INT64_MAX, count = 2;
        if (x.kind == INT) numbers[0] = -1, numbers[1] = 99, count = 2;
        if (x.kind == FLOAT) numbers[1] = 1, count = 2;
        /* Which other fields the call has follows from these. */
        if (x.kind == CALLBACK || is_one_of(name, "scaling activation residual_out q_transposed")) count = 0;
        for (int k = 0; k < count; k++) {
            wrong w = {i, numbers[k], LK_OK, first};
            arguments a = good_of(f);
            const arguments good = a;
            spoil(f, &a, w);
            if (!memcmp(&a, &good, sizeof a)) continue;
            w.status = call(f, a, text_of(f, w), false);
            if (is_refusal(w.status)) all.push_back(w);
        }
    }
    return all;
}

static void pairs(const function &f, size_t each)
{
    static const char *const one_of_two[][2] = {{"q_weight", "dq_weight"}, {"k_weight", "dk_weight"}, {"up", "interleaved"},
                                                    {"dweight_ids", "dweight_rows"}, {"dweight", "dweight_ids"}};
    const std::vector<wrong> all = all_wrong(f);
    for (size_t i = 0; i < all.size(); i++)
        for (size_t j = 0; j < i; j++) {
            const wrong &v = all[j], &w = all[i];
            if (v.at == w.at || (each > 1 && random_below(each))) continue;
            /* Whether one field is wrong follows from the other. Two that were NULL, and get the same address, overlap. */
            bool depends = v.number == w.number && w.number == address(0) && v.status != LK_ERR_SHAPE && w.status != LK_ERR_SHAPE;
            for (const auto &d : one_of_two)
                depends = depends || (last((*f.list)[v.at]) == d[0] && last((*f.list)[w.at]) == d[1]);
            for (const wrong *c : {&v, &w}) /* given or not, these two say which of the others the call has */
                depends = depends || (is_one_of(last((*f.list)[c->at]), "full_logits dfull_logits") && changes_whether(f, *c));
            if (depends) continue;
            arguments a = good_of(f);
            spoil(f, &a, v), spoil(f, &a, w);
            const std::string changed = text_of(f, v) + text_of(f, w);
            const lk_status status = call(f, a, changed, false), earlier = v.status > w.status ? v.status : w.status;
            const bool right = v.first == w.first ? status == earlier || (v.first && (status == v.status || status == w.status))
                                                  : status == (v.first ? v.status : w.status);
            if (!right) complain(f, "it is not the first rule that is broken", changed, status);
        }
}

/* ---- Tensors that lie in others ------------------------------------------------------------------------------------------ */

/* Whether the call looks at this pointer. */
static bool is_there(const function &f, const arguments &good, size_t i)
{
    const field &x = (*f.list)[i];
    arguments a = good;
    uintptr_t pointer;
    memcpy(&pointer, a.bytes + x.at, sizeof pointer);
    if (x.kind != POINTER || !pointer || last(x) == "context") return false;
    put(&a, x, (int64_t)pointer + 1);
    return call(f, a, x.name, false) == LK_ERR_ALIGNMENT;
}

/* empty: of a rank without columns, whose tensors of columns overlap nothing. */
static void spaces(const function &f, bool empty)
{
    const char *const columns = empty ? "logits dlogits teacher weight bias dweight dbias teacher_weight teacher_bias saved" : "";
    static const char *const pairs_in_place[][2] = {
        {"dlogits", "logits"}, {"dx", "x"}, {"y", "x"}, {"dx", "dy"}, {"residual_out", "residual"}, {"dx", "dresidual_out"},
        {"dresidual", "dresidual_out"}, {"lse_rounded", "lse"}, {"y", "gate"}, {"y", "up"}, {"dgate", "gate"}, {"dgate", "dy"},
        {"dup", "up"}, {"dup", "dy"}, {"q_out", "q"}, {"k_out", "k"}, {"dq", "dq_out"}, {"dk", "dk_out"}, {"dq", "q"}, {"dk", "k"}};
    /* What backward reads of forward. */
    static const char read_back[] = "logits lse lse_low entropy valid_rows weight_sum tail states rstd residual_out q_rstd k_rstd";
    const arguments good = good_of(f);
    const std::string name = f.name;
    const bool backward = name.find("_backward_") != std::string::npos && name.find("forward_backward") == std::string::npos;
    const fields &list = *f.list;
    for (size_t i = 0; i < list.size(); i++) {
        const bool workspace = list[i].kind == WORKSPACE;
        if (is_one_of(last(list[i]), columns) || (!workspace && !is_there(f, good, i))) continue;
        arguments none = good;
        put(&none, list[i], 0);
        if (workspace && call(f, none, list[i].name, false) != LK_ERR_WORKSPACE) continue; /* the call needs none */
        const bool given = last(list[i]) == "logits" && strstr(f.good, "logits_given=1");
        const bool input = !list[i].out || given || (backward && is_one_of(last(list[i]), read_back));
        for (size_t j = 0; j < list.size() && (workspace || !input); j++) {
            if (j == i || !is_there(f, good, j) || is_one_of(last(list[j]), columns)) continue;
            bool may = false;
            for (const auto &p : pairs_in_place)
                may = may || (last(list[i]) == p[0] && last(list[j]) == p[1]) || (last(list[i]) == p[1] && last(list[j]) == p[0]);
            arguments a = good;
            put(&a, list[i], address(j));
            const std::string changed = list[i].name + " where " + list[j].name + " is";
            const lk_status status = call(f, a, changed, true);
            if (!may && status != LK_ERR_SHAPE) complain(f, "they overlap", changed, status);
        }
    }
}

/* ---- Calls of very many matmuls ------------------------------------------------------------------------------------------ */

/* good: of a function like one of the table, whose matmuls would take a minute to go through. */
static void soon(const char *name, const char *good)
{
    for (const function &known : functions) {
        if (strcmp(known.name, name)) continue;
        function f = known;
        f.good = good;
        const clock_t begun = clock();
        const lk_status status = call(f, good_of(f), good, false);
        if (status <= 0 || clock() - begun > 5 * CLOCKS_PER_SEC) complain(f, "the first launch does not come soon", good, status);
        return;
    }
    failed++, printf("%s is not in the table\n", name);
}

int main(int argc, char **argv)
{
    const long count = argc > 1 ? atol(argv[1]) : 400;
    state = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    if (lk_linear_cross_entropy_init(&context) || lk_linear_kl_init(&kl_context) || lk_linear_topk_init(&topk_context) || cudaStreamCreate(&stream)) return 2;
    for (const function &f : functions) {
        const lk_status status = call(f, good_of(f), "nothing changed", true);
        if (status) complain(f, "the good call fails", "nothing changed", status);
        fuzz(f, count);
        pairs(f, count < 10000 ? 8 : 1);
        spaces(f, false);
        if (!strstr(f.name, "_parallel_")) continue;
        function rank = f;
        const std::string no_columns = "common.vocab=0 common.common.vocab=0 " + std::string(f.good);
        rank.good = no_columns.c_str();
        spaces(rank, true);
    }
    soon("lk_linear_cross_entropy_forward_f32", LCE_SMALL "tokens=16384 vocab=16384 chunk_tokens=1 panel_vocab=1 path=2");
    soon("lk_linear_cross_entropy_forward_backward_bf16", LCE_SMALL "tokens=16777216 vocab=16 slice_tokens=1 path=1");
    soon("lk_linear_kl_forward_f32", "tokens=16777216 hidden=16 vocab=40 chunk_tokens=1");
    if (failed) printf("%ld failures of %ld calls\n", failed, calls);
    return failed != 0;
}

// SPDX-License-Identifier: MIT
// Stands between lk_torch and lk's library in a process of test.py (LD_PRELOAD), and notes what each call gets: its tensors of rows,
// as the structs of the headers have them. test.py, group layouts, compiles it and reads the notes.
//
//   lk_calls_open(path)   the library; 0: it is there
//   lk_calls()            the notes since the last time, a line a call: function, columns, and name=address,distance,bytes of each
//                         tensor. A distance of 0 means packed
#include <dlfcn.h>

#include <cstring>
#include <string>

#include "lk/cross_entropy_ids.cuh"
#include "lk/cross_entropy_probabilities.cuh"
#include "lk/glu.cuh"
#include "lk/kl.cuh"
#include "lk/linear_cross_entropy_ids.cuh"
#include "lk/linear_kl.cuh"
#include "lk/logsumexp.cuh"
#include "lk/md_lrpe_cosine.cuh"
#include "lk/rope.cuh"
#include "lk/srms_norm_fp8.cuh"
#include "lk/srms_norm_gated.cuh"

static void *library;
static std::string noted, told;

extern "C" int lk_calls_open(const char *path) { return (library = dlopen(path, RTLD_NOW | RTLD_NOLOAD)) ? 0 : 1; }
extern "C" const char *lk_calls(void)
{
    told.swap(noted), noted.clear();
    return told.c_str();
}

static void begin(const char *function, int64_t cols) { noted += std::string(function) + " " + std::to_string(cols); }
static void tensor(const char *name, const void *data, int64_t distance, int bytes)
{
    noted += std::string(" ") + name + "=" + std::to_string((uintptr_t)data) + "," + std::to_string(distance) + "," + std::to_string(bytes);
}
#define ROWS(field) tensor(#field, a.field, a.field##_stride, bytes)
#define ROWS_OF(field, type) tensor(#field, a.field, a.field##_stride, a.type == LK_DTYPE_F32 ? 4 : bytes)
// A token's rows: those of batches and heads are at multiples of this distance, or of another one that counts as well.
#define TOKENS(field)                                                                                                          \
    tensor(#field, a.field, a.field##_token_stride, bytes), tensor(#field "_heads", a.field, a.field##_head_stride, bytes),    \
        tensor(#field "_batches", a.field, a.field##_batch_stride, bytes)

static void note(const lk_logsumexp_args &a, bool backward, int bytes)
{
    tensor("x", a.x, a.outer_stride, bytes);
    if (backward) tensor("dx", a.dx, a.dx_outer_stride, bytes);
}
static void note(const lk_glu_args &a, bool backward, int bytes)
{
    ROWS(gate), ROWS(up);
    if (backward) ROWS(dy), ROWS(dgate), ROWS(dup);
    else ROWS(y);
}
#define HEADS(field)                                                                                                           \
    tensor(#field, a.field, a.field##_stride[1], bytes), tensor(#field "_heads", a.field, a.field##_stride[2], bytes),         \
        tensor(#field "_batches", a.field, a.field##_stride[0], bytes)
static void note(const lk_rope_args &a, bool backward, int bytes)
{
    HEADS(q), HEADS(k);
    if (backward) HEADS(dq_out), HEADS(dk_out), HEADS(dq), HEADS(dk);
    else HEADS(q_out), HEADS(k_out);
    tensor("cos", a.cos, a.table_stride[1], a.table_dtype == LK_DTYPE_F32 ? 4 : bytes);
}
static void note(const lk_kl_args &a, bool backward, int bytes)
{
    ROWS(logits);
    if (backward) ROWS(dlogits);
}
static void note(const lk_cross_entropy_args &a, bool backward, int bytes)
{
    ROWS(logits);
    if (backward) ROWS(dlogits);
}
static void note(const lk_cross_entropy_ids_args &a, bool backward, int bytes) { note(a.common, backward, bytes); }
static void note(const lk_srms_norm_args &a, bool backward, int bytes)
{
    const int columns = a.weight_dtype == LK_DTYPE_F32 ? 4 : bytes;
    ROWS(x), ROWS_OF(residual, residual_dtype), ROWS_OF(residual_out, residual_dtype);
    if (backward) ROWS_OF(dy, dy_dtype), ROWS_OF(dresidual_out, residual_dtype), ROWS(dx), ROWS_OF(dresidual, residual_dtype);
    else ROWS(y);
    tensor("weight", a.weight, a.cols, columns), tensor("bias", a.bias, a.cols, columns);
}
static void note(const lk_srms_norm_gated_args &args, bool backward, int bytes)
{
    note(args.common, backward, bytes);
    tensor("gate", args.gate, args.gate_stride ? args.gate_stride : args.common.cols, bytes);
    if (backward) tensor("dgate", args.dgate, args.dgate_stride ? args.dgate_stride : args.common.cols, bytes);
}
static void note(const lk_srms_norm_fp8_args &args, bool, int bytes)
{
    const lk_srms_norm_args &a = args.common;
    ROWS(x), ROWS_OF(residual, residual_dtype), ROWS_OF(residual_out, residual_dtype);
    tensor("weight", a.weight, a.cols, a.weight_dtype == LK_DTYPE_F32 ? 4 : bytes);
}
static void note(const lk_md_lrpe_cosine_args &a, bool backward, int bytes)
{
    TOKENS(x);
    if (backward) TOKENS(dy), TOKENS(dx);
    else TOKENS(y);
}
static void note(const lk_linear_cross_entropy_args &a, bool, int bytes) { tensor("x", a.x, a.x_stride ? a.x_stride : a.hidden, bytes); }
static void note(const lk_linear_cross_entropy_ids_args &a, bool backward, int bytes) { note(a.common, backward, bytes); }
static void note(const lk_linear_kl_args &a, bool, int bytes)
{
    tensor("x", a.x, a.x_stride ? a.x_stride : a.hidden, bytes);
    tensor("teacher_x", a.teacher_x, a.teacher_x_stride ? a.teacher_x_stride : a.teacher_hidden, bytes);
}

#define CALL(op, direction, cols, T, bytes)                                                                                    \
    extern "C" lk_status lk_##op##_##direction##_##T(const lk_##op##_args *a, cudaStream_t stream)                             \
    {                                                                                                                          \
        static const char name[] = "lk_" #op "_" #direction "_" #T;                                                            \
        begin(name, (int64_t)a->cols), note(*a, strstr(#direction, "backward"), bytes), noted += "\n";                         \
        return ((lk_status(*)(const lk_##op##_args *, cudaStream_t))dlsym(library, name))(a, stream);                          \
    }
#define CALLS(op, direction, cols) CALL(op, direction, cols, f32, 4) CALL(op, direction, cols, f16, 2) CALL(op, direction, cols, bf16, 2)
typedef lk_cross_entropy_args lk_cross_entropy_probabilities_args;
CALLS(logsumexp, forward, cols)
CALLS(logsumexp, backward, cols)
CALLS(glu, forward, cols)
CALLS(glu, backward, cols)
CALLS(rope, forward, dim)
CALLS(rope, backward, dim)
CALLS(kl, backward, vocab)
CALLS(cross_entropy, backward, vocab)
CALLS(cross_entropy, forward_backward, vocab)
CALLS(cross_entropy_probabilities, backward, vocab)
CALLS(cross_entropy_probabilities, forward_backward, vocab)
CALLS(cross_entropy_ids, backward, common.vocab)
CALLS(srms_norm, forward, cols)
CALLS(srms_norm, backward, cols)
CALLS(srms_norm_fp8, forward, common.cols)
CALLS(srms_norm_gated, forward, common.cols)
CALLS(srms_norm_gated, backward, common.cols)
CALLS(md_lrpe_cosine, forward, dim)
CALLS(md_lrpe_cosine, backward, dim)
CALLS(linear_cross_entropy, forward_backward, hidden)
CALLS(linear_cross_entropy_ids, forward, common.hidden)
CALLS(linear_cross_entropy_ids, backward, common.hidden)
CALLS(linear_kl, forward_backward, hidden)

// SPDX-License-Identifier: MIT
/* bench/cross_entropy.cu - lk_cross_entropy against its ceiling and the formula as simple kernels; how to run it: bench.h. */
#include "bench/bench.h"
#include "lk/cross_entropy.cuh"
#include "lk/cross_entropy_ids_parallel.cuh"
#include "lk/cross_entropy_parallel.cuh"
#include "lk/cross_entropy_probabilities.cuh"

#define FUNCTIONS(T)                                                                                                           \
    LK_DEFINE_CROSS_ENTROPY(T)                                                                                                 \
    LK_DEFINE_CROSS_ENTROPY_IDS(T)                                                                                             \
    LK_DEFINE_CROSS_ENTROPY_IDS_PARALLEL(T)                                                                                    \
    LK_DEFINE_CROSS_ENTROPY_PARALLEL(T)                                                                                        \
    LK_DEFINE_CROSS_ENTROPY_PROBABILITIES(T)
FUNCTIONS(bf16)
FUNCTIONS(f16)
FUNCTIONS(f32)
/* lk's function for a case: of class probabilities, or of targets. */
#define LK_CALL(s, direction, ...)                                                                                             \
    ((s)->prob ? OF_TYPE(s, lk_cross_entropy_probabilities_##direction, __VA_ARGS__)                                           \
               : OF_TYPE(s, lk_cross_entropy_##direction, __VA_ARGS__))
/* The same with ranks: of ids, or of a target. */
#define LK_CALL_SPLIT(s, direction, with, stream)                                                                              \
    (ids_of(s) ? OF_TYPE(s, lk_cross_entropy_ids_parallel_##direction, &(with)->ids, stream)                                   \
               : OF_TYPE(s, lk_cross_entropy_parallel_##direction, &(with)->labels, stream))

typedef struct {
    const char *name, *direction, *dtype;
    int64_t rows, vocab;
    int mean; /* else none */
    int path; /* LK_CROSS_ENTROPY_* */
    int low;  /* backward is given lse_low too */
    int prob; /* class probabilities instead of targets, of so many bytes */
} shape;

/* "forward then backward" is what forward_backward replaces: lk's two launches, with the same inputs and outputs. "ranks=1":
 * the kernels for columns that are split over ranks, by the only rank; forward is forward and finish, without a collective.
 * "ids=64": so many weighted ids per row instead of a target. "tail=1": and one more bin, all other columns, of weight 0.5.
 * "upstream=rows": an upstream gradient for each row; with lse_low that is what the bindings' backward calls, as is mean in f16.
 * "softcap=30": under that softcap. "smoothing=0.1": with that label_smoothing. "statistics=1": entropy and the three statistics too.
 * "dlogits=e5m2": gradients in 8 bits, of an upstream that puts them into the type's range. */
static const shape shapes[] = {
    {"rows=4096 vocab=1024 reduction=none", "forward", "bf16", 4096, 1024, 0, 0, 0, 0},
    {"rows=4096 vocab=2048 reduction=none", "forward", "bf16", 4096, 2048, 0, 0, 0, 0},
    {"rows=4096 vocab=4096 reduction=none", "forward", "bf16", 4096, 4096, 0, 0, 0, 0},
    {"rows=4096 vocab=8192 reduction=none", "forward", "bf16", 4096, 8192, 0, 0, 0, 0},
    {"rows=4096 vocab=16384 reduction=none", "forward", "bf16", 4096, 16384, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none", "forward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=65536 reduction=none", "forward", "bf16", 4096, 65536, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none", "forward", "bf16", 4096, 131072, 0, 0, 0, 0},
    {"rows=4096 vocab=1024 reduction=mean", "forward", "bf16", 4096, 1024, 1, 0, 0, 0},
    {"rows=4096 vocab=8192 reduction=mean", "forward", "bf16", 4096, 8192, 1, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=mean", "forward", "bf16", 4096, 131072, 1, 0, 0, 0},
    {"rows=4096 vocab=50257 reduction=none", "forward", "bf16", 4096, 50257, 0, 0, 0, 0},
    {"rows=4096 vocab=50264 reduction=none", "forward", "bf16", 4096, 50264, 0, 0, 0, 0},
    {"rows=4093 vocab=32003 reduction=none", "forward", "bf16", 4093, 32003, 0, 0, 0, 0},
    {"rows=4096 vocab=151936 reduction=none", "forward", "bf16", 4096, 151936, 0, 0, 0, 0},
    {"rows=1 vocab=151936 reduction=none", "forward", "bf16", 1, 151936, 0, 0, 0, 0},
    {"rows=64 vocab=128256 reduction=none", "forward", "bf16", 64, 128256, 0, 0, 0, 0},
    {"rows=1000 vocab=32003 reduction=none", "forward", "bf16", 1000, 32003, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none", "forward", "f16", 4096, 131072, 0, 0, 0, 0},
    {"rows=4096 vocab=65536 reduction=none", "forward", "f32", 4096, 65536, 0, 0, 0, 0},
    {"rows=4096 vocab=1024 reduction=none", "backward", "bf16", 4096, 1024, 0, 0, 0, 0},
    {"rows=4096 vocab=2048 reduction=none", "backward", "bf16", 4096, 2048, 0, 0, 0, 0},
    {"rows=4096 vocab=4096 reduction=none", "backward", "bf16", 4096, 4096, 0, 0, 0, 0},
    {"rows=4096 vocab=8192 reduction=none", "backward", "bf16", 4096, 8192, 0, 0, 0, 0},
    {"rows=4096 vocab=16384 reduction=none", "backward", "bf16", 4096, 16384, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none", "backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=65536 reduction=none", "backward", "bf16", 4096, 65536, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none", "backward", "bf16", 4096, 131072, 0, 0, 0, 0},
    {"rows=4096 vocab=1024 reduction=mean", "backward", "bf16", 4096, 1024, 1, 0, 0, 0},
    {"rows=4096 vocab=8192 reduction=mean", "backward", "bf16", 4096, 8192, 1, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=mean", "backward", "bf16", 4096, 131072, 1, 0, 0, 0},
    {"rows=4096 vocab=50257 reduction=none", "backward", "bf16", 4096, 50257, 0, 0, 0, 0},
    {"rows=4096 vocab=50264 reduction=none", "backward", "bf16", 4096, 50264, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none", "backward", "f16", 4096, 131072, 0, 0, 0, 0},
    {"rows=4096 vocab=65536 reduction=none", "backward", "f32", 4096, 65536, 0, 0, 0, 0},
    {"rows=4096 vocab=1024 reduction=none lse_low=1", "backward", "bf16", 4096, 1024, 0, 0, 1, 0},
    {"rows=4096 vocab=8192 reduction=none lse_low=1", "backward", "bf16", 4096, 8192, 0, 0, 1, 0},
    {"rows=4096 vocab=65536 reduction=none lse_low=1", "backward", "f32", 4096, 65536, 0, 0, 1, 0},
    {"rows=4096 vocab=32768 reduction=mean lse_low=1", "backward", "f16", 4096, 32768, 1, 0, 1, 0},
    {"rows=8 vocab=151935 reduction=none lse_low=1 upstream=rows", "backward", "bf16", 8, 151935, 0, 0, 1, 0},
    {"rows=4096 vocab=4096 reduction=none lse_low=1 upstream=rows", "backward", "bf16", 4096, 4096, 0, 0, 1, 0},
    {"rows=4096 vocab=65536 reduction=none lse_low=1 upstream=rows", "backward", "bf16", 4096, 65536, 0, 0, 1, 0},
    {"rows=4090 vocab=32003 reduction=none lse_low=1 upstream=rows", "backward", "bf16", 4090, 32003, 0, 0, 1, 0},
    {"rows=4096 vocab=1024 reduction=none", "forward_backward", "bf16", 4096, 1024, 0, 0, 0, 0},
    {"rows=4096 vocab=2048 reduction=none", "forward_backward", "bf16", 4096, 2048, 0, 0, 0, 0},
    {"rows=4096 vocab=4096 reduction=none", "forward_backward", "bf16", 4096, 4096, 0, 0, 0, 0},
    {"rows=4096 vocab=8192 reduction=none", "forward_backward", "bf16", 4096, 8192, 0, 0, 0, 0},
    {"rows=4096 vocab=16384 reduction=none", "forward_backward", "bf16", 4096, 16384, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none", "forward_backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=65536 reduction=none", "forward_backward", "bf16", 4096, 65536, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none", "forward_backward", "bf16", 4096, 131072, 0, 0, 0, 0},
    {"rows=4096 vocab=1024 reduction=mean", "forward_backward", "bf16", 4096, 1024, 1, 0, 0, 0},
    {"rows=4096 vocab=8192 reduction=mean", "forward_backward", "bf16", 4096, 8192, 1, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=mean", "forward_backward", "bf16", 4096, 131072, 1, 0, 0, 0},
    {"rows=4096 vocab=50257 reduction=none", "forward_backward", "bf16", 4096, 50257, 0, 0, 0, 0},
    {"rows=4096 vocab=50264 reduction=none", "forward_backward", "bf16", 4096, 50264, 0, 0, 0, 0},
    {"rows=4093 vocab=32003 reduction=none", "forward_backward", "bf16", 4093, 32003, 0, 0, 0, 0},
    {"rows=8 vocab=151935 reduction=mean", "forward_backward", "bf16", 8, 151935, 1, 0, 0, 0},
    {"rows=100 vocab=32003 reduction=mean", "forward_backward", "bf16", 100, 32003, 1, 0, 0, 0},
    {"rows=1000 vocab=151935 reduction=mean", "forward_backward", "bf16", 1000, 151935, 1, 0, 0, 0},
    {"rows=8188 vocab=32003 reduction=mean", "forward_backward", "bf16", 8188, 32003, 1, 0, 0, 0},
    {"rows=4096 vocab=151936 reduction=none", "forward_backward", "bf16", 4096, 151936, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none", "forward_backward", "f16", 4096, 131072, 0, 0, 0, 0},
    {"rows=4096 vocab=65536 reduction=none", "forward_backward", "f32", 4096, 65536, 0, 0, 0, 0},
    {"rows=4096 vocab=1024 reduction=none", "forward then backward", "bf16", 4096, 1024, 0, 0, 0, 0},
    {"rows=4096 vocab=2048 reduction=none", "forward then backward", "bf16", 4096, 2048, 0, 0, 0, 0},
    {"rows=4096 vocab=4096 reduction=none", "forward then backward", "bf16", 4096, 4096, 0, 0, 0, 0},
    {"rows=4096 vocab=8192 reduction=none", "forward then backward", "bf16", 4096, 8192, 0, 0, 0, 0},
    {"rows=4096 vocab=16384 reduction=none", "forward then backward", "bf16", 4096, 16384, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none", "forward then backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=65536 reduction=none", "forward then backward", "bf16", 4096, 65536, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none", "forward then backward", "bf16", 4096, 131072, 0, 0, 0, 0},
    {"rows=4096 vocab=1024 reduction=mean", "forward then backward", "bf16", 4096, 1024, 1, 0, 0, 0},
    {"rows=4096 vocab=8192 reduction=mean", "forward then backward", "bf16", 4096, 8192, 1, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=mean", "forward then backward", "bf16", 4096, 131072, 1, 0, 0, 0},
    {"rows=4096 vocab=50257 reduction=none", "forward then backward", "bf16", 4096, 50257, 0, 0, 0, 0},
    {"rows=4096 vocab=50264 reduction=none", "forward then backward", "bf16", 4096, 50264, 0, 0, 0, 0},
    {"rows=4093 vocab=32003 reduction=none", "forward then backward", "bf16", 4093, 32003, 0, 0, 0, 0},
    {"rows=4096 vocab=151936 reduction=none", "forward then backward", "bf16", 4096, 151936, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none", "forward then backward", "f16", 4096, 131072, 0, 0, 0, 0},
    {"rows=4096 vocab=65536 reduction=none", "forward then backward", "f32", 4096, 65536, 0, 0, 0, 0},
    {"rows=4096 vocab=4096 reduction=none target_prob=T", "forward", "bf16", 4096, 4096, 0, 0, 0, 2},
    {"rows=4096 vocab=32768 reduction=none target_prob=T", "forward", "bf16", 4096, 32768, 0, 0, 0, 2},
    {"rows=4096 vocab=32768 reduction=none target_prob=f32", "forward", "bf16", 4096, 32768, 0, 0, 0, 4},
    {"rows=4096 vocab=4096 reduction=none target_prob=T", "backward", "bf16", 4096, 4096, 0, 0, 0, 2},
    {"rows=4096 vocab=32768 reduction=none target_prob=T", "backward", "bf16", 4096, 32768, 0, 0, 0, 2},
    {"rows=4096 vocab=32768 reduction=none target_prob=f32", "backward", "bf16", 4096, 32768, 0, 0, 0, 4},
    {"rows=4096 vocab=4096 reduction=none target_prob=T", "forward_backward", "bf16", 4096, 4096, 0, 0, 0, 2},
    {"rows=4096 vocab=32768 reduction=none target_prob=T", "forward_backward", "bf16", 4096, 32768, 0, 0, 0, 2},
    {"rows=4096 vocab=32768 reduction=none target_prob=f32", "forward_backward", "bf16", 4096, 32768, 0, 0, 0, 4},
    {"rows=4096 vocab=131072 reduction=none target_prob=T", "forward_backward", "bf16", 4096, 131072, 0, 0, 0, 2},
    {"rows=4096 vocab=32768 reduction=none softcap=30", "forward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none softcap=30", "backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none softcap=30", "forward_backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none softcap=30", "forward_backward", "bf16", 4096, 131072, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none smoothing=0.1", "forward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none smoothing=0.1", "backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=4096 reduction=none smoothing=0.1", "backward", "bf16", 4096, 4096, 0, 0, 0, 0},
    {"rows=16384 vocab=1000 reduction=none smoothing=0.1", "forward_backward", "bf16", 16384, 1000, 0, 0, 0, 0},
    {"rows=4096 vocab=4096 reduction=none smoothing=0.1", "forward_backward", "bf16", 4096, 4096, 0, 0, 0, 0},
    {"rows=8192 vocab=16384 reduction=none smoothing=0.1", "forward_backward", "bf16", 8192, 16384, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none smoothing=0.1", "forward_backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=50257 reduction=none smoothing=0.1", "forward_backward", "bf16", 4096, 50257, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none smoothing=0.1", "forward_backward", "bf16", 4096, 131072, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none smoothing=0.1", "forward_backward", "f32", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=4096 reduction=none dlogits=e5m2", "forward_backward", "bf16", 4096, 4096, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none dlogits=e5m2", "backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none dlogits=e5m2", "forward_backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none dlogits=e5m2", "forward_backward", "f32", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none softcap=30 dlogits=e5m2", "forward_backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=49152 vocab=50304 reduction=none dlogits=e5m2", "forward_backward", "bf16", 49152, 50304, 0, 0, 0, 0},
    {"rows=49152 vocab=50304 reduction=none softcap=11.5 dlogits=e5m2", "forward_backward", "bf16", 49152, 50304, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none statistics=1", "forward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=8192 vocab=16384 reduction=none ranks=1", "forward", "bf16", 8192, 16384, 0, 0, 0, 0},
    {"rows=8192 vocab=16384 reduction=none ids=8 ranks=1", "forward", "bf16", 8192, 16384, 0, 0, 0, 0},
    {"rows=8192 vocab=16384 reduction=none ids=64 ranks=1", "forward", "bf16", 8192, 16384, 0, 0, 0, 0},
    {"rows=8192 vocab=16384 reduction=none ranks=1", "forward then backward", "bf16", 8192, 16384, 0, 0, 0, 0},
    {"rows=8192 vocab=16384 reduction=none ids=8 ranks=1", "forward then backward", "bf16", 8192, 16384, 0, 0, 0, 0},
    {"rows=8192 vocab=16384 reduction=none ids=64 ranks=1", "forward then backward", "bf16", 8192, 16384, 0, 0, 0, 0},
    {"rows=4096 vocab=4096 reduction=none ranks=1", "forward", "bf16", 4096, 4096, 0, 0, 0, 0},
    {"rows=4096 vocab=16384 reduction=none ranks=1", "forward", "bf16", 4096, 16384, 0, 0, 0, 0},
    {"rows=4096 vocab=65536 reduction=none ranks=1", "forward", "bf16", 4096, 65536, 0, 0, 0, 0},
    {"rows=4096 vocab=4096 reduction=none ranks=1", "backward", "bf16", 4096, 4096, 0, 0, 0, 0},
    {"rows=4096 vocab=16384 reduction=none ranks=1", "backward", "bf16", 4096, 16384, 0, 0, 0, 0},
    {"rows=4096 vocab=65536 reduction=none ranks=1", "backward", "bf16", 4096, 65536, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none ids=1", "forward_backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none ids=8", "forward_backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none ids=64", "forward_backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none ids=1", "forward_backward", "bf16", 4096, 131072, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none ids=8", "forward_backward", "bf16", 4096, 131072, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none ids=64", "forward_backward", "bf16", 4096, 131072, 0, 0, 0, 0},
    {"rows=100 vocab=32003 reduction=none ids=8", "forward_backward", "bf16", 100, 32003, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none ids=64 tail=1", "forward_backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none ids=8 tail=1", "forward_backward", "bf16", 4096, 131072, 0, 0, 0, 0},
    {"rows=8192 vocab=16384 reduction=none ids=8 tail=1 ranks=1", "forward then backward", "bf16", 8192, 16384, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none ids=1", "forward then backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none ids=8", "forward then backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=32768 reduction=none ids=64", "forward then backward", "bf16", 4096, 32768, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none ids=1", "forward then backward", "bf16", 4096, 131072, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none ids=8", "forward then backward", "bf16", 4096, 131072, 0, 0, 0, 0},
    {"rows=4096 vocab=131072 reduction=none ids=64", "forward then backward", "bf16", 4096, 131072, 0, 0, 0, 0},
};
#define CASES ((int)(sizeof shapes / sizeof shapes[0]))

/* Those whose host time is taken: little work. A block of the last one asks for 64 KiB of shared memory, of the one before
 * for 8; from 32 on a launch has the kernel's limit of it looked at, and raised if need be. */
static const shape host_shapes[] = {
    {"rows=16 vocab=1024 reduction=none", "forward", "bf16", 16, 1024, 0, 0, 0, 0},
    {"rows=16 vocab=1024 reduction=mean", "forward_backward", "bf16", 16, 1024, 1, 0, 0, 0},
    {"rows=16 vocab=2048 reduction=none path=block", "backward", "f32", 16, 2048, 0, LK_CROSS_ENTROPY_BLOCK, 0, 0},
    {"rows=16 vocab=16384 reduction=none path=block", "backward", "f32", 16, 16384, 0, LK_CROSS_ENTROPY_BLOCK, 0, 0},
};
#define HOSTS ((int)(sizeof host_shapes / sizeof host_shapes[0]))

/* The least traffic: forward reads the logits and the class probabilities, the others read them and write dlogits. Targets, lse
 * and losses, 16 bytes a row, are not counted, nor statistics, 16 more; nor is what each id takes, up to 192 bytes. */
#define LOGITS_BYTES(s) ((size_t)((s)->rows * (s)->vocab) * element_bytes(s))
#define TRAFFIC_READ(s) (LOGITS_BYTES(s) + (size_t)((s)->rows * (s)->vocab * (s)->prob))
#define TRAFFIC_WRITE(s) (!gives_gradient(s) ? 0 : is_e5m2(s) ? (size_t)((s)->rows * (s)->vocab) : LOGITS_BYTES(s))

static bool gives_loss(const shape *s)
{
    return strcmp(s->direction, "backward") != 0;
}

static bool gives_gradient(const shape *s)
{
    return strcmp(s->direction, "forward") != 0;
}

static bool is_split(const shape *s)
{
    return strstr(s->name, " ranks=") != NULL;
}

static int64_t ids_of(const shape *s)
{
    const char *const ids = strstr(s->name, " ids=");
    return ids ? atoi(ids + 5) : 0;
}
static float tail_weight_of(const shape *s) { return strstr(s->name, " tail=1") ? 0.5f : 0.0f; }
/* With ranks: the bytes of the states and of the ids' logits. Two such blocks come before what is workspace: forward writes the
 * first, finish the second. */
static size_t block_of(const shape *s)
{
    return (size_t)s->rows * (16 + ((size_t)ids_of(s) * 2 + 15) / 16 * 16);
}
static float softcap_of(const shape *s)
{
    const char *const softcap = strstr(s->name, " softcap=");
    return softcap ? (float)atof(softcap + 9) : 0.0f;
}
static float smoothing_of(const shape *s)
{
    const char *const smoothing = strstr(s->name, " smoothing=");
    return smoothing ? (float)atof(smoothing + 11) : 0.0f;
}
static bool has_statistics(const shape *s)
{
    return strstr(s->name, " statistics=") != NULL;
}
static bool has_upstreams(const shape *s) /* one for each row */
{
    return strstr(s->name, " upstream=rows") != NULL;
}
static bool is_e5m2(const shape *s) /* dlogits */
{
    return strstr(s->name, " dlogits=e5m2") != NULL;
}
static double z_of(const shape *s, float logit)
{
    const double softcap = (double)softcap_of(s);
    return softcap > 0 ? softcap * tanh((double)logit / softcap) : (double)logit;
}

/* The targets of all rows. */
static size_t targets_of(const shape *s)
{
    return (size_t)(s->rows * (ids_of(s) ? ids_of(s) : 1));
}

static bool is_fused(const shape *s)
{
    return strcmp(s->direction, "forward_backward") == 0;
}

static size_t element_bytes(const shape *s)
{
    return strcmp(s->dtype, "f32") == 0 ? sizeof(lk_f32) : sizeof(lk_bf16);
}

/* The small tensors. `in` holds the targets, for a gradient one value, or one for each row, upstream, and for backward alone
 * valid_rows, lse and, where it is given, lse_low; `out` holds for what gives a loss valid_rows where it is wanted, lse, and the
 * losses or their mean: no gap, since every word of it must be written. With ids their weights come in `in`, with a tail its
 * weights in `in` and itself in `out`, with statistics entropy in `out`, and for backward alone with ranks a block of states in
 * `in`. */
typedef struct {
    int64_t *target, *valid_rows;
    float *lse, *lse_low, *loss, *upstream; /* lse_low: NULL unless it is given */
    void *kept;                             /* states that finish writes and backward reads; NULL without ranks */
    float *weight;                          /* of ids */
    float *tail_weight, *tail;              /* NULL without a tail */
    float *entropy;                         /* [4, rows]; NULL without statistics */
    size_t in_bytes, out_bytes;
} smalls;

static smalls smalls_of(const shape *s, const bench_buffers *set)
{
    const size_t rows = (size_t)s->rows, target = sizeof(int64_t), lse = target + targets_of(s) * sizeof(int64_t);
    const size_t low = gives_loss(s) ? lse : lse + rows * sizeof(float), upstream = s->low ? low + rows * sizeof(float) : low;
    const size_t counts = s->mean ? sizeof(int64_t) : 0;
    smalls t = {};
    t.target = (int64_t *)(set->in + target);
    t.valid_rows = (int64_t *)(gives_loss(s) ? set->out : set->in);
    t.lse = (float *)(gives_loss(s) ? set->out + counts : set->in + lse);
    if (s->low) t.lse_low = (float *)(set->in + low);
    t.loss = (float *)(set->out + counts) + rows;
    t.upstream = (float *)(set->in + upstream);
    t.in_bytes = gives_gradient(s) ? upstream + (has_upstreams(s) ? rows : 1) * sizeof(float) : lse;
    t.out_bytes = gives_loss(s) ? counts + (rows + (s->mean ? 1 : rows)) * sizeof(float) : 0;
    if (ids_of(s)) t.weight = (float *)(set->in + t.in_bytes), t.in_bytes += targets_of(s) * sizeof(float);
    if (tail_weight_of(s) > 0) {
        t.tail_weight = (float *)(set->in + t.in_bytes), t.in_bytes += rows * sizeof(float);
        t.tail = (float *)(set->out + t.out_bytes), t.out_bytes += rows * sizeof(float);
    }
    if (has_statistics(s)) t.entropy = (float *)(set->out + t.out_bytes), t.out_bytes += 4 * rows * sizeof(float);
    if (!is_split(s)) return t;
    t.kept = set->workspace + block_of(s);
    if (gives_loss(s)) return t;
    t.in_bytes = (t.in_bytes + 15) / 16 * 16, t.kept = set->in + t.in_bytes, t.in_bytes += block_of(s);
    return t;
}

/* ---- The baseline: the formula, untuned --------------------------------------------------------------------------------- */

typedef struct {
    const void *logits;
    const int64_t *target;
    float *lse, *loss;     /* loss: [rows]; NULL to skip */
    float *mean;           /* [1]; with valid_rows */
    int64_t *valid_rows;   /* out of forward, into backward for mean; else NULL */
    const float *upstream; /* [1] */
    void *dlogits;
    int64_t rows, vocab;
    bool given;            /* lse is an input, and so is valid_rows */
} naive_args;

#define NAIVE_THREADS 256

/* The largest, or the sum, of every thread's value, for all of them. */
LK_DEVICE float naive_reduce(float value, bool largest)
{
    LK_SHARED(float, part, [NAIVE_THREADS]);
    __syncthreads(); /* everyone has read the result before */
    part[threadIdx.x] = value;
    for (int half = NAIVE_THREADS / 2; half > 0; half /= 2) {
        __syncthreads(); /* part is complete up to 2 half */
        if ((int)threadIdx.x >= half) continue;
        const float other = part[threadIdx.x + half];
        part[threadIdx.x] = largest ? fmaxf(part[threadIdx.x], other) : part[threadIdx.x] + other;
    }
    __syncthreads(); /* part[0] is the result */
    return part[0];
}

/* A block owns a row: the maximum first, then the sum of exponentials, the logits read for each. */
template <class T> LK_KERNEL void naive_forward_kernel(naive_args a)
{
    const int64_t row = blockIdx.x;
    const T *logits = (const T *)a.logits + row * a.vocab;
    float max = -INFINITY, sum = 0.0f;
    for (int64_t col = threadIdx.x; col < a.vocab; col += NAIVE_THREADS) max = fmaxf(max, lk_to_float(logits[col]));
    max = naive_reduce(max, true);
    for (int64_t col = threadIdx.x; col < a.vocab; col += NAIVE_THREADS) sum += expf(lk_to_float(logits[col]) - max);
    const float lse = max + logf(naive_reduce(sum, false));
    if (threadIdx.x != 0) return;
    a.lse[row] = lse;
    if (a.loss) a.loss[row] = lse - lk_to_float(logits[a.target[row]]);
}

/* One block: the mean of the rows' losses. */
template <class T> LK_KERNEL void naive_mean_kernel(naive_args a)
{
    float sum = 0.0f;
    for (int64_t row = threadIdx.x; row < a.rows; row += NAIVE_THREADS)
        sum += a.lse[row] - lk_to_float(((const T *)a.logits)[row * a.vocab + a.target[row]]);
    sum = naive_reduce(sum, false);
    if (threadIdx.x == 0) *a.mean = sum / (float)a.rows, *a.valid_rows = a.rows;
}

/* A thread owns one element. */
template <class T> LK_KERNEL void naive_backward_kernel(naive_args a)
{
    const int64_t i = (int64_t)blockIdx.x * NAIVE_THREADS + threadIdx.x;
    if (i >= a.rows * a.vocab) return;
    const int64_t row = i / a.vocab, col = i % a.vocab;
    const float upstream = a.valid_rows ? *a.upstream / (float)*a.valid_rows : *a.upstream;
    const float p = expf(lk_to_float(((const T *)a.logits)[i]) - a.lse[row]);
    lk_put((T *)a.dlogits + i, upstream * (p - (col == a.target[row] ? 1.0f : 0.0f)));
}

/* ---- The four functions of a case --------------------------------------------------------------------------------------- */

/* Launches the kernels that the outputs in args ask for. */
template <class T> static lk_status launch_kernels_t(const naive_args &args, cudaStream_t stream)
{
    const int64_t pieces = lk_ceil_div(args.rows * args.vocab, NAIVE_THREADS);
    cudaError_t error = cudaSuccess;
    if (!args.given) error = lk_launch(naive_forward_kernel<T>, args.rows, NAIVE_THREADS, 0, stream, args);
    if (!error && args.mean) error = lk_launch(naive_mean_kernel<T>, 1, NAIVE_THREADS, 0, stream, args);
    if (!error && args.dlogits) error = lk_launch(naive_backward_kernel<T>, pieces, NAIVE_THREADS, 0, stream, args);
    return (lk_status)error;
}

static lk_status launch_kernels(const shape *s, const naive_args &args, cudaStream_t stream)
{
    if (strcmp(s->dtype, "f32") == 0) return launch_kernels_t<lk_f32>(args, stream);
    if (strcmp(s->dtype, "f16") == 0) return launch_kernels_t<lk_f16>(args, stream);
    return launch_kernels_t<lk_bf16>(args, stream);
}

static lk_status launch_naive(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    (void)path;
    const shape *s = (const shape *)c->context;
    const smalls t = smalls_of(s, set);
    naive_args args = {};
    args.logits = set->read, args.target = t.target, args.lse = t.lse, args.rows = s->rows, args.vocab = s->vocab;
    if (s->mean) args.valid_rows = t.valid_rows;
    args.given = !gives_loss(s);
    if (gives_gradient(s)) args.upstream = t.upstream, args.dlogits = set->write;
    if (gives_loss(s)) *(s->mean ? &args.mean : &args.loss) = t.loss;
    return launch_kernels(s, args, stream);
}

/* One struct serves all directions: each call looks at its own fields alone. */
static lk_cross_entropy_args args_of(const bench_case *c, const bench_buffers *set, int path)
{
    const shape *s = (const shape *)c->context;
    const smalls t = smalls_of(s, set);
    lk_cross_entropy_args args = {};
    args.logits = set->read, args.target = t.target, args.loss = t.loss, args.lse = t.lse;
    if (!is_fused(s)) args.lse_low = t.lse_low;
    args.upstream = t.upstream, args.upstream_per_row = has_upstreams(s), args.dlogits = set->write;
    args.rows = s->rows, args.vocab = s->vocab, args.softcap = softcap_of(s), args.label_smoothing = smoothing_of(s);
    args.use_ignore_index = 1, args.ignore_index = -100;
    args.entropy = t.entropy, args.statistics = t.entropy != NULL;
    if (s->mean) args.reduction = LK_REDUCTION_MEAN, args.valid_rows = t.valid_rows;
    args.workspace = c->workspace_bytes ? set->workspace : NULL, args.workspace_bytes = c->workspace_bytes;
    args.path = path ? path : s->path, args.dlogits_dtype = is_e5m2(s) ? LK_DTYPE_E5M2 : LK_DTYPE_T;
    if (is_split(s)) args.workspace = NULL, args.workspace_bytes = 0; /* states lie there */
    if (!s->prob) return args;
    args.target = NULL, args.target_prob = set->read + LOGITS_BYTES(s);
    args.target_prob_dtype = s->prob == 4 ? LK_DTYPE_F32 : LK_DTYPE_T;
    return args;
}

static lk_cross_entropy_ids_args ids_args_of(const bench_case *c, const bench_buffers *set, int path)
{
    const shape *s = (const shape *)c->context;
    const smalls t = smalls_of(s, set);
    lk_cross_entropy_ids_args args = {};
    args.common = args_of(c, set, path), args.common.target = NULL;
    args.target_ids = t.target, args.target_weight = t.weight, args.ids_per_row = ids_of(s);
    args.tail_weight = t.tail_weight, args.tail = t.tail;
    if (!is_split(s)) return args;
    args.common.workspace = set->workspace + 2 * block_of(s);
    args.common.workspace_bytes = c->workspace_bytes - 2 * block_of(s);
    return args;
}

/* The arguments with ranks, of labels or of ids. The states of the only rank are those of all. kept: for finish and backward. */
typedef struct {
    lk_cross_entropy_parallel_args labels;
    lk_cross_entropy_ids_parallel_args ids;
} split_args;

static split_args split_args_of(const bench_case *c, const bench_buffers *set, int path, bool kept)
{
    const shape *s = (const shape *)c->context;
    split_args args = {};
    lk_vocab_parallel only = {};
    only.vocab_total = s->vocab, only.ranks = 1;
    void *const states = kept ? smalls_of(s, set).kept : set->workspace;
    args.labels = {args_of(c, set, path), only, states, set->workspace};
    args.ids = {ids_args_of(c, set, path), only, states, set->workspace};
    return args;
}

/* The weight of id number i of all; those of a row add up to about 1. */
static float id_weight(const shape *s, size_t i) { return (float)(i % 5) / (float)(2 * ids_of(s)); }

/* Class probabilities: between 0 and 2 / vocab. */
typedef struct {
    void *prob;
    int64_t count;
    float most;
    uint64_t seed;
} prob_fill_args;

template <class T> LK_KERNEL void prob_fill_kernel(prob_fill_args a)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < a.count; i += (int64_t)gridDim.x * blockDim.x) {
        const uint64_t h = ((a.seed << 40) + (uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
        lk_put((T *)a.prob + i, a.most * (float)((h ^ h >> 29) >> 40 & 0xffff) / 65536.0f);
    }
}

/* Logits; targets, in the first and the last column for the first and the last row, anywhere for the others; for a gradient
 * upstream, and for backward alone the lse of these logits, by lk where it is in two parts, and the number of rows. */
static void fill(const bench_case *c, const bench_buffers *set, int number, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    const smalls t = smalls_of(s, set);
    const size_t targets = targets_of(s);
    bench_fill(s->dtype, set->read, s->rows * s->vocab, 1.5f, 2 * (uint64_t)number, stream);
    int64_t *target = (int64_t *)malloc(targets * sizeof *target);
    float *weight = (float *)malloc(targets * sizeof *weight);
    uint64_t state = (uint64_t)number + 1;
    for (size_t i = 0; i < targets; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        target[i] = i == 0 ? 0 : i == targets - 1 ? s->vocab - 1 : (int64_t)((state >> 32) % (uint64_t)s->vocab);
        if (t.weight) weight[i] = id_weight(s, i);
    }
    BENCH_CUDA(cudaMemcpyAsync(t.target, target, targets * sizeof *target, cudaMemcpyHostToDevice, stream));
    if (t.weight) BENCH_CUDA(cudaMemcpyAsync(t.weight, weight, targets * sizeof *weight, cudaMemcpyHostToDevice, stream));
    BENCH_CUDA(cudaStreamSynchronize(stream));
    for (int64_t row = 0; t.tail_weight && row < s->rows; row++) weight[row] = tail_weight_of(s);
    if (t.tail_weight) BENCH_CUDA(cudaMemcpy(t.tail_weight, weight, (size_t)s->rows * sizeof *weight, cudaMemcpyHostToDevice));
    free(target), free(weight);
    const int64_t upstreams = has_upstreams(s) ? s->rows : 1;
    if (gives_gradient(s)) bench_fill("f32", t.upstream, upstreams, is_e5m2(s) ? 4096.0f : 1.0f, 2 * (uint64_t)number + 1, stream);
    const prob_fill_args prob = {set->read + LOGITS_BYTES(s), s->rows * s->vocab, 2.0f / (float)s->vocab, (uint64_t)number};
    void (*const fill_prob)(prob_fill_args) = s->prob == 2 ? prob_fill_kernel<lk_bf16> : prob_fill_kernel<lk_f32>;
    if (s->prob) BENCH_CUDA(lk_launch(fill_prob, 8192, 256, 0, stream, prob));
    if (gives_loss(s)) return;
    naive_args args = {};
    args.logits = set->read, args.target = t.target, args.lse = t.lse, args.rows = s->rows, args.vocab = s->vocab;
    lk_cross_entropy_args forward = args_of(c, set, 0);
    forward.loss = NULL;
    if (is_split(s)) {
        split_args first = split_args_of(c, set, 0, false), then = split_args_of(c, set, 0, true);
        first.labels.common.loss = then.labels.common.loss = NULL;
        BENCH_CUDA((cudaError_t)LK_CALL_SPLIT(s, forward, &first, stream));
        BENCH_CUDA((cudaError_t)LK_CALL_SPLIT(s, finish, &then, stream));
    } else
        BENCH_CUDA((cudaError_t)(s->low || softcap_of(s) > 0 ? LK_CALL(s, forward, &forward, stream)
                                                             : launch_kernels(s, args, stream)));
    BENCH_CUDA(cudaMemcpyAsync(t.valid_rows, &s->rows, sizeof s->rows, cudaMemcpyHostToDevice, stream));
}

static lk_status launch_lk(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    const lk_cross_entropy_args args = args_of(c, set, path);
    lk_status status = LK_OK;
    if (is_split(s)) {
        const split_args first = split_args_of(c, set, path, false), then = split_args_of(c, set, path, true);
        if (gives_loss(s)) status = LK_CALL_SPLIT(s, forward, &first, stream);
        if (!status && gives_loss(s)) status = LK_CALL_SPLIT(s, finish, &then, stream);
        return status || !gives_gradient(s) ? status : LK_CALL_SPLIT(s, backward, &then, stream);
    }
    if (ids_of(s)) {
        const lk_cross_entropy_ids_args with_ids = ids_args_of(c, set, path);
        if (is_fused(s)) return OF_TYPE(s, lk_cross_entropy_ids_forward_backward, &with_ids, stream);
        status = OF_TYPE(s, lk_cross_entropy_ids_forward, &with_ids, stream);
        return status ? status : OF_TYPE(s, lk_cross_entropy_ids_backward, &with_ids, stream);
    }
    if (is_fused(s)) return LK_CALL(s, forward_backward, &args, stream);
    if (gives_loss(s)) status = LK_CALL(s, forward, &args, stream);
    if (!status && gives_gradient(s)) status = LK_CALL(s, backward, &args, stream);
    return status;
}

/* ---- Checks against double ---------------------------------------------------------------------------------------------- */

/* Half a unit in the last place of the value 1, and of subnormals, which may flush where T is no f16. */
template <class T> constexpr double HALF_ULP = sizeof(T) == 4 ? 0x1p-24 : 0x1p-8;
template <> constexpr double HALF_ULP<lk_f16> = 0x1p-11;
template <class T> constexpr double LEAST = 0x1p-126;
template <> constexpr double LEAST<lk_f16> = 0x1p-25;

/* A number of e5m2, which is the upper half of an f16. */
static float number_of_e5m2(uint8_t bits)
{
    const int field = bits >> 2 & 31, mantissa = (bits & 3) + (field ? 4 : 0);
    if (field == 31) return NAN; /* of no result here */
    return (bits & 0x80 ? -1.0f : 1.0f) * ldexpf((float)mantissa, (field ? field : 1) - 17);
}

static bool within(double value, double expected, double limit, const char *name, int64_t row, int64_t col, char *why,
                   size_t why_bytes)
{
    if (fabs(value - expected) <= limit) return true;
    snprintf(why, why_bytes, "%s[%lld,%lld] is %.9g, not %.9g; limit %.2g", name, (long long)row, (long long)col, value,
             expected, limit);
    return false;
}

/* Row `row` of logits or dlogits, in a buffer that the caller frees. */
template <class T> static T *fetch_row(const shape *s, const char *tensor, int64_t row)
{
    const size_t bytes = (size_t)s->vocab * sizeof(T);
    T *host = (T *)malloc(bytes);
    BENCH_CUDA(cudaMemcpy(host, tensor + (size_t)row * bytes, bytes, cudaMemcpyDeviceToHost));
    return host;
}

/* What the host has of the small tensors; upstream is over valid_rows for mean. */
typedef struct {
    int64_t *target;
    float *lse, *loss, *lse_low; /* lse_low: NULL unless it is given */
    float *entropy;              /* NULL without statistics */
    float *tail;                 /* NULL without a tail */
    double upstream; /* of the row that is looked at */
} fetched;

/* Row `row` of the class probabilities, in a buffer that the caller frees. Ids are probabilities of a few classes, and smoothing
 * gives one to each. */
static double *fetch_prob(const shape *s, const bench_buffers *set, const fetched *f, int64_t row)
{
    const size_t count = (size_t)s->vocab, bytes = count * (size_t)s->prob, ids = (size_t)ids_of(s);
    double *host = (double *)calloc(count, sizeof(double));
    for (size_t i = (size_t)row * ids; i < (size_t)(row + 1) * ids; i++) host[f->target[i]] += (double)id_weight(s, i);
    if (smoothing_of(s) > 0) {
        const double e = (double)smoothing_of(s);
        for (size_t col = 0; col < count; col++) host[col] = e / (double)count;
        host[f->target[row]] += 1 - e;
    }
    if (!s->prob) return host;
    char *raw = (char *)malloc(bytes);
    BENCH_CUDA(cudaMemcpy(raw, set->read + LOGITS_BYTES(s) + (size_t)row * bytes, bytes, cudaMemcpyDeviceToHost));
    for (size_t col = 0; col < count; col++)
        host[col] = s->prob == 4 ? (double)((const float *)raw)[col] : (double)(float)((const lk_bf16 *)raw)[col];
    free(raw);
    return host;
}

/* p of all columns that are none of row `row`'s ids; those columns are at 1 in *rest, which the caller frees. */
static double tail_right(const shape *s, const fetched *f, int64_t row, const double *p, char **rest)
{
    double sum = 0;
    *rest = (char *)malloc((size_t)s->vocab), memset(*rest, 1, (size_t)s->vocab);
    for (int64_t i = row * ids_of(s); i < (row + 1) * ids_of(s); i++) (*rest)[f->target[i]] = 0;
    for (int64_t col = 0; col < s->vocab; col++) sum += (*rest)[col] ? p[col] : 0;
    return sum;
}

/* Holds row `row` against double. lse, which the operation wrote or was given, is within the header's limit: the gradients'
 * limits stand on it. The loss is within that and the rounding of a difference. p[j], relative to the lse that backward was
 * given and to the exact one otherwise, is off by (4 + |z - lse| + |lse|) 2^-23, the |lse| where an lse was saved and read
 * again, and with lse_low by (8 + |z - lse|) 2^-23; then it is rounded to T. The target's gradient is minus the sum of the
 * others, with the sum of their errors; the baseline's p[y] - 1 is off by the error of lse besides. With class probabilities
 * each gradient is a difference, and off by its terms' rounding. Under a softcap z is off by softcap 2^-20. */
template <class T>
static bool check_row(const shape *s, const bench_buffers *set, const fetched *f, int64_t row, char *why, size_t why_bytes)
{
    const bool gradient = gives_gradient(s), eight = is_e5m2(s);
    T *logits = fetch_row<T>(s, set->read, row), *dlogits = gradient && !eight ? fetch_row<T>(s, set->write, row) : NULL;
    uint8_t *bytes = gradient && eight ? fetch_row<uint8_t>(s, set->write, row) : NULL;
    const bool has_prob = s->prob || ids_of(s) || smoothing_of(s) > 0;
    const int64_t y = has_prob ? -1 : f->target[row];
    double *prob = has_prob ? fetch_prob(s, set, f, row) : NULL, total = 0, weighted = 0;
    double max = -INFINITY, min = INFINITY, magnitude = 0, sum = 0, others = 0, errors = 0, first = 0, squares = 0, all = 0;
    for (int64_t col = 0; col < s->vocab; col++) {
        const double z = z_of(s, (float)logits[col]);
        max = fmax(max, z), min = fmin(min, z), magnitude = fmax(magnitude, fabs(z));
    }
    for (int64_t col = 0; col < s->vocab; col++) {
        const double z = z_of(s, (float)logits[col]), e = exp(z - max);
        sum += e, first += e * z, squares += e * e, all += z;
    }
    const double saved = (double)f->lse[row] + (f->lse_low ? (double)f->lse_low[row] : 0);
    const double right = max + log(sum), lse = gives_loss(s) ? right : saved;
    const double softcap = (double)softcap_of(s), z_limit = softcap * 0x1p-20;
    const double lse_limit = 8 * 0x1p-24 * ((f->lse_low ? max - min : magnitude) + log((double)s->vocab) + 1) + z_limit;
    const double constant = f->lse_low ? 8 : 4 + fabs(lse);
    bool ok = within(saved, right, lse_limit, "lse", row, 0, why, why_bytes);
    const double statistics[] = {right - first / sum, log(squares) - 2 * log(sum), all / (double)s->vocab, max - right};
    static const char *const names[] = {"entropy", "log_sum_sq_probs", "mean_logits", "top_logprob"};
    for (int i = 0; ok && f->entropy && i < 4; i++) /* each is a sum of a few terms that are as far off as lse */
        ok = within(f->entropy[i * s->rows + row], statistics[i], 4 * lse_limit, names[i], row, 0, why, why_bytes);
    for (int64_t col = 0; prob && col < s->vocab; col++)
        total += prob[col], weighted += prob[col] * z_of(s, (float)logits[col]);
    const double tail_weight = tail_weight_of(s);
    double tail = 1;
    if (tail_weight > 0) { /* of the tail's gradient, that of column col is tail_weight (p - p / tail), or of ids tail_weight p */
        double *const p = (double *)malloc((size_t)s->vocab * sizeof *p);
        char *rest;
        for (int64_t col = 0; col < s->vocab; col++) p[col] = exp(z_of(s, (float)logits[col]) - right);
        tail = tail_right(s, f, row, p, &rest);
        for (int64_t col = 0; col < s->vocab; col++) prob[col] += rest[col] ? tail_weight * p[col] / tail : 0;
        ok = ok && within(f->tail[row], log(tail), 4 * lse_limit, "tail", row, 0, why, why_bytes);
        free(p), free(rest);
    }
    if (ok && gives_loss(s) && !s->mean) {
        const double loss = prob ? total * right - weighted - tail_weight * log(tail) : right - z_of(s, (float)logits[y]);
        const double limit = (lse_limit + z_limit) * (fmax(1, total) + 4 * tail_weight) + fabs(loss) * 0x1p-24;
        ok = within(f->loss[row], loss, limit, "loss", row, y, why, why_bytes);
    }
    total += tail_weight;
    for (int64_t col = 0; gradient && col < s->vocab; col++) {
        const double z = z_of(s, (float)logits[col]), p = exp(z - lse);
        if (col != y) others += p, errors += p * ((constant + fabs(z - lse)) * 0x1p-23 + 2 * z_limit);
    }
    for (int64_t col = 0; ok && gradient && col < s->vocab; col++) {
        const double z = z_of(s, (float)logits[col]), p = exp(z - lse);
        const double expected = f->upstream * (prob ? total * p - prob[col] : col == y ? -others : p);
        const double rounded = prob ? (total * p + prob[col]) * 0x1p-20 : 0;
        const double error = col == y ? errors + lse_limit : p * ((constant + fabs(z - lse)) * 0x1p-23 + 2 * z_limit) + rounded;
        const double slope = softcap > 0 ? 1 - z / softcap * (z / softcap) : 1; /* (5 + |logit / softcap|) 2^-22: within 2^-18 */
        const double capped = 0x1p-18 + (strcmp(s->direction, "forward_backward") ? 0 : eight ? 0x1p-8 : 0x1p-10); /* its codes' rounding */
        const double limit = slope * (fabs(expected) * ((eight ? 0x1p-3 : HALF_ULP<T>) + (softcap > 0 ? capped : 0)) +
                                      fabs(f->upstream) * error) + (eight ? 0x1p-17 : LEAST<T>);
        ok = within(eight ? number_of_e5m2(bytes[col]) : (float)dlogits[col], expected * slope, limit, "dlogits", row, col, why, why_bytes);
    }
    free(logits), free(dlogits), free(bytes), free(prob);
    return ok;
}

/* Holds the mean against that of all rows, from the lse of each: at most rows / 256 additions in a row round to 2^-24 of the
 * sum, and the losses of which it is made are off as one row's is. */
template <class T>
static bool check_mean(const shape *s, const bench_buffers *set, const fetched *f, char *why, size_t why_bytes)
{
    double mean = 0, magnitude = 0;
    for (int64_t row = 0; row < s->rows; row++) {
        T logit;
        BENCH_CUDA(cudaMemcpy(&logit, (const T *)set->read + row * s->vocab + f->target[row], sizeof logit,
                              cudaMemcpyDeviceToHost));
        const double z = (float)logit, loss = (double)f->lse[row] - z;
        mean += loss / (double)s->rows, magnitude += (fabs(z) + fabs((double)f->lse[row]) + 1) / (double)s->rows;
    }
    const double limit = (8 + (double)s->rows / 256) * 0x1p-24 * magnitude;
    int64_t valid_rows;
    BENCH_CUDA(cudaMemcpy(&valid_rows, smalls_of(s, set).valid_rows, sizeof valid_rows, cudaMemcpyDeviceToHost));
    return within((double)valid_rows, (double)s->rows, 0, "valid_rows", 0, 0, why, why_bytes) &&
           within(f->loss[0], mean, limit, "the mean loss", 0, 0, why, why_bytes);
}

/* Checks the first, the last and two rows between, and the mean of all. */
template <class T> static bool check(const bench_case *c, const bench_buffers *set, char *why, size_t why_bytes)
{
    const shape *s = (const shape *)c->context;
    const smalls t = smalls_of(s, set);
    const int64_t rows[4] = {0, s->rows / 3, s->rows * 2 / 3, s->rows - 1};
    const size_t floats = (size_t)s->rows * sizeof(float), losses = s->mean ? sizeof(float) : floats;
    const size_t targets = targets_of(s) * sizeof(int64_t);
    fetched f = {(int64_t *)malloc(targets), (float *)malloc(floats), (float *)malloc(floats), NULL, NULL, NULL, 0};
    if (s->low) {
        f.lse_low = (float *)malloc(floats);
        BENCH_CUDA(cudaMemcpy(f.lse_low, t.lse_low, floats, cudaMemcpyDeviceToHost));
    }
    BENCH_CUDA(cudaMemcpy(f.target, t.target, targets, cudaMemcpyDeviceToHost));
    BENCH_CUDA(cudaMemcpy(f.lse, t.lse, floats, cudaMemcpyDeviceToHost));
    if (gives_loss(s)) BENCH_CUDA(cudaMemcpy(f.loss, t.loss, losses, cudaMemcpyDeviceToHost));
    if (t.entropy) f.entropy = (float *)malloc(4 * floats);
    if (t.entropy) BENCH_CUDA(cudaMemcpy(f.entropy, t.entropy, 4 * floats, cudaMemcpyDeviceToHost));
    if (t.tail) f.tail = (float *)malloc(floats);
    if (t.tail) BENCH_CUDA(cudaMemcpy(f.tail, t.tail, floats, cudaMemcpyDeviceToHost));
    bool right = true;
    for (int k = 0; right && k < 4; k++) {
        float upstream = 0.0f;
        const float *const from = t.upstream + (has_upstreams(s) ? rows[k] : 0);
        if (gives_gradient(s)) BENCH_CUDA(cudaMemcpy(&upstream, from, sizeof upstream, cudaMemcpyDeviceToHost));
        f.upstream = (double)upstream / (s->mean ? (double)s->rows : 1.0);
        right = check_row<T>(s, set, &f, rows[k], why, why_bytes);
    }
    if (right && s->mean && gives_loss(s)) right = check_mean<T>(s, set, &f, why, why_bytes);
    free(f.target), free(f.lse), free(f.loss), free(f.lse_low), free(f.entropy), free(f.tail);
    return right;
}

static size_t workspace(const bench_case *c, int path)
{
    const shape *s = (const shape *)c->context;
    if (is_split(s) && !ids_of(s)) return (gives_loss(s) ? 2 : 1) * block_of(s); /* backward alone has the second in `in` */
    char *anywhere = (char *)256; /* the query looks at what is NULL, and at no memory */
    const bench_buffers set = {anywhere, anywhere, anywhere, anywhere, anywhere};
    size_t bytes = 0, other = 0;
    if (is_split(s)) { /* backward's is the largest */
        const split_args then = split_args_of(c, &set, path, true);
        (void)LK_CALL_SPLIT(s, backward_workspace_bytes, &then, &bytes);
        return 2 * block_of(s) + bytes;
    }
    if (ids_of(s)) { /* the larger of the two calls' */
        const lk_cross_entropy_ids_args with_ids = ids_args_of(c, &set, path);
        if (is_fused(s)) (void)OF_TYPE(s, lk_cross_entropy_ids_forward_backward_workspace_bytes, &with_ids, &bytes);
        if (!is_fused(s)) (void)OF_TYPE(s, lk_cross_entropy_ids_forward_workspace_bytes, &with_ids, &bytes);
        if (!is_fused(s)) (void)OF_TYPE(s, lk_cross_entropy_ids_backward_workspace_bytes, &with_ids, &other);
        return bytes > other ? bytes : other;
    }
    const lk_cross_entropy_args args = args_of(c, &set, path);
    const lk_status status = is_fused(s) ? LK_CALL(s, forward_backward_workspace_bytes, &args, &bytes)
                                         : LK_CALL(s, forward_workspace_bytes, &args, &bytes);
    return status ? 0 : bytes;
}

static void describe(bench_case *c, const shape *s)
{
    const bench_buffers nowhere = {};
    const smalls t = smalls_of(s, &nowhere);
    c->name = s->name, c->direction = s->direction, c->dtype = s->dtype;
    c->read_bytes = TRAFFIC_READ(s), c->write_bytes = TRAFFIC_WRITE(s);
    c->in_bytes = t.in_bytes, c->out_bytes = t.out_bytes;
    c->mix = gives_gradient(s) ? bench_streams<1, 1>() : bench_streams<1, 0>();
    if (gives_gradient(s) && is_e5m2(s)) c->mix = element_bytes(s) == 2 ? bench_streams<2, 1>() : bench_streams<4, 1>();
    if (gives_gradient(s) && s->prob) c->mix = s->prob == 2 ? bench_streams<2, 1>() : bench_streams<3, 1>();
    c->context = s;
    const bool options = s->low || s->prob || ids_of(s) || is_split(s) || softcap_of(s) > 0 || smoothing_of(s) > 0 ||
                         has_statistics(s) || is_e5m2(s);
    c->fill = fill, c->launch = launch_lk, c->naive = options ? NULL : launch_naive;
    c->check = check<lk_bf16>;
    if (strcmp(s->dtype, "f32") == 0) c->check = check<lk_f32>;
    if (strcmp(s->dtype, "f16") == 0) c->check = check<lk_f16>;
    if (gives_loss(s) || is_split(s)) c->workspace = workspace;
}

int main(int argc, char **argv)
{
    static bench_case cases[CASES], hosts[HOSTS];
    for (int k = 0; k < CASES; k++) describe(&cases[k], &shapes[k]);
    for (int k = 0; k < HOSTS; k++) describe(&hosts[k], &host_shapes[k]);
    return bench_run("cross_entropy", cases, CASES, hosts, HOSTS, argc, argv);
}

// SPDX-License-Identifier: MIT
/* What a call launches on a card like an H200, without one: which kernels, with how many blocks and threads. It runs on the
 * simulator, which launches nothing then (SIMT_PLAN=1), so any size takes a moment.
 *
 *     make plan-cross_entropy ARGS="forward_backward bf16 4096 50257"     rows, vocab
 *     make plan-linear_cross_entropy ARGS="forward bf16 4096 2048 50257"  tokens, hidden, vocab
 *     make plan-srms_norm                                                 says what there is
 *
 * The call has packed rows at multiples of 256 bytes and no options. What it computes is printed where ARGS are missing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Addresses for tensors. They hold nothing. */
static void *tensor(void)
{
    void *const at = mmap(NULL, (size_t)1 << 40, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at != MAP_FAILED) return at;
    perror("mmap");
    exit(2);
}
#define FLOATS ((float *)tensor())

/* Each op: the names of its sizes, how they and the tensors of a plain call go into the struct, and the elements of a row. */
#if defined(LK_CROSS_ENTROPY_CUH) && !defined(LK_LINEAR_CROSS_ENTROPY_CUH)
static const char sizes[] = "rows vocab", tensors[] = "loss, lse and dlogits";
static int64_t fill(lk_cross_entropy_args *a, const int64_t *n)
{
    a->rows = n[0], a->vocab = n[1], a->logits = tensor(), a->target = tensor();
    a->loss = FLOATS, a->lse = FLOATS, a->dlogits = tensor();
    return n[1];
}
#elif defined(LK_LINEAR_CROSS_ENTROPY_CUH)
static const char sizes[] = "tokens hidden vocab", tensors[] = "loss, lse, dx and dweight";
static lk_linear_cross_entropy_context context;
static int64_t fill(lk_linear_cross_entropy_args *a, const int64_t *n)
{
    lk_linear_cross_entropy_init(&context);
    a->context = &context, a->tokens = n[0], a->hidden = n[1], a->vocab = n[2];
    a->x = tensor(), a->weight = tensor(), a->target = tensor();
    a->loss = FLOATS, a->lse = FLOATS, a->dx = tensor(), a->dweight = tensor();
    return n[2];
}
#elif defined(LK_LINEAR_KL_CUH)
static const char sizes[] = "tokens hidden vocab", tensors[] = "loss, dx and dweight";
static lk_linear_kl_context context;
static int64_t fill(lk_linear_kl_args *a, const int64_t *n)
{
    lk_linear_kl_init(&context);
    a->context = &context, a->tokens = n[0], a->hidden = n[1], a->vocab = n[2];
    a->x = tensor(), a->weight = tensor(), a->teacher_x = tensor(), a->teacher_weight = tensor();
    a->loss = FLOATS, a->dx = tensor(), a->dweight = tensor();
    return n[2];
}
#elif defined(LK_KL_CUH)
static const char sizes[] = "rows vocab", tensors[] = "loss and dlogits";
static int64_t fill(lk_kl_args *a, const int64_t *n)
{
    a->rows = n[0], a->vocab = n[1], a->logits = tensor(), a->teacher = tensor(), a->loss = FLOATS, a->dlogits = tensor();
    return n[1];
}
#elif defined(LK_LOGSUMEXP_CUH)
static const char sizes[] = "outer cols inner", tensors[] = "lse and dx";
static int64_t fill(lk_logsumexp_args *a, const int64_t *n)
{
    a->outer = n[0], a->cols = n[1], a->inner = n[2], a->x = tensor(), a->lse = FLOATS, a->dlse = FLOATS, a->dx = tensor();
    return n[2] == 1 ? n[1] : n[2];
}
#elif defined(LK_SRMS_NORM_CUH)
static const char sizes[] = "rows cols", tensors[] = "y, rstd, dx and dweight; with a weight";
static int64_t fill(lk_srms_norm_args *a, const int64_t *n)
{
    a->rows = n[0], a->cols = n[1], a->x = tensor(), a->weight = tensor(), a->y = tensor(), a->rstd = FLOATS;
    a->dy = tensor(), a->dx = tensor(), a->dweight = tensor();
    return n[1];
}
#elif defined(LK_LINEAR_SUPPORT_CUH)
static const char sizes[] = "tokens hidden vocab entries", tensors[] = "logits and logp, or dx and dweight";
static int64_t fill(lk_linear_support_args *a, const int64_t *n)
{
    a->tokens = n[0], a->hidden = n[1], a->vocab = n[2], a->entries = n[3], a->x = tensor(), a->weight = tensor();
    a->offsets = tensor(), a->ids = tensor(), a->target = tensor(), a->logits = FLOATS, a->logp = FLOATS, a->dlogp = FLOATS;
    a->dx = tensor(), a->dweight = tensor();
    return n[1];
}
#elif defined(LK_LINEAR_TOPK_CUH)
static const char sizes[] = "tokens hidden vocab k", tensors[] = "ids, logp and lse";
static lk_linear_topk_context context;
static int64_t fill(lk_linear_topk_args *a, const int64_t *n)
{
    lk_linear_topk_init(&context);
    a->context = &context, a->tokens = n[0], a->hidden = n[1], a->vocab = n[2], a->k = (int)n[3];
    a->x = tensor(), a->weight = tensor(), a->ids = tensor(), a->logp = FLOATS, a->lse = FLOATS;
    return n[2];
}
#elif defined(LK_GLU_CUH)
static const char sizes[] = "rows cols", tensors[] = "y, or dgate and dup; silu";
static int64_t fill(lk_glu_args *a, const int64_t *n)
{
    a->rows = n[0], a->cols = n[1], a->gate = tensor(), a->up = tensor(), a->y = tensor(), a->dy = tensor();
    a->dgate = tensor(), a->dup = tensor();
    return n[1];
}
#elif defined(LK_ROPE_CUH)
static const char sizes[] = "batch tokens q_heads dim", tensors[] = "q_out and k_out, or dq and dk; a quarter as many heads in k";
static int64_t fill(lk_rope_args *a, const int64_t *n)
{
    a->batch = n[0], a->tokens = n[1], a->q_heads = n[2], a->k_heads = (n[2] + 3) / 4, a->dim = n[3];
    a->inv_freq = FLOATS, a->q = tensor(), a->k = tensor(), a->q_out = tensor(), a->k_out = tensor();
    a->dq_out = tensor(), a->dk_out = tensor(), a->dq = tensor(), a->dk = tensor();
    return n[3];
}
#elif defined(LK_MD_LRPE_COSINE_CUH)
static const char sizes[] = "batch heads tokens dim", tensors[] = "y and dx; one grid dimension";
static int64_t fill(lk_md_lrpe_cosine_args *a, const int64_t *n)
{
    a->batch = n[0], a->heads = n[1], a->shape[0] = n[2], a->dim = n[3];
    a->x = tensor(), a->theta = tensor(), a->y = tensor(), a->dy = tensor(), a->dx = tensor();
    return n[3];
}
#endif

/* The workspace, of ops that have one. */
template <class Args> static auto give_workspace(Args *a, size_t bytes) -> decltype((void)a->workspace)
{
    printf("workspace: %zu bytes\n", bytes);
    a->workspace_bytes = bytes, a->workspace = bytes ? tensor() : NULL;
}
template <class... None> static void give_workspace(None...) {}

/* Fills in and calls one function of the op. Returns the elements of a row, or -1. */
typedef int64_t plan_call(const int64_t *n);
template <class Args>
static int64_t plan_of(const int64_t *n, lk_status (*call)(const Args *, cudaStream_t), lk_status (*query)(const Args *, size_t *))
{
    Args args = {};
    const int64_t cols = fill(&args, n);
    size_t bytes = 0;
    lk_status status = query(&args, &bytes);
    if (!status) give_workspace(&args, bytes), status = call(&args, NULL);
    if (status) printf("%s\n", lk_last_error());
    return status ? -1 : cols;
}
typedef struct {
    const char *function, *type;
    int bytes;
    plan_call *call;
} plan_entry;
#define PLAN_CALL(op, name, direction, T)                                                                                      \
    {#name, #T, sizeof(lk_##T),                                                                                                \
     [](const int64_t *n) { return plan_of(n, lk_##op##_##name##_##T, lk_##op##_##name##_workspace_bytes_##T); }},
#define PLAN_PLANNED(op, name, direction, head, T) PLAN_CALL(op, name, direction, T)
#define PLAN_SAVED(op, T)
#define PLAN_OP_(OP) LK_DEFINE_##OP(f32) LK_DEFINE_##OP(f16) LK_DEFINE_##OP(bf16)
#define PLAN_OP(OP) PLAN_OP_(OP)
#define PLAN_LIST_(OP, T) LK_##OP##_FUNCTIONS(PLAN, T)
#define PLAN_LIST(OP, T) PLAN_LIST_(OP, T)
PLAN_OP(PLAN_NAME)

int main(int argc, char **argv)
{
    static const plan_entry entries[] = {PLAN_LIST(PLAN_NAME, f32) PLAN_LIST(PLAN_NAME, f16) PLAN_LIST(PLAN_NAME, bf16)};
    int count = 1;
    int64_t n[4] = {};
    for (const char *c = sizes; *c; c++) count += *c == ' ';
    const plan_entry *found = NULL;
    for (const plan_entry &e : entries)
        if (argc == 3 + count && !strcmp(argv[1], e.function) && !strcmp(argv[2], e.type)) found = &e;
    bool good = found;
    for (int i = 0; good && i < count; i++) {
        char *end;
        n[i] = strtoll(argv[3 + i], &end, 10), good = *end == 0;
    }
    if (!good) {
        printf("ARGS=\"function type %s\". Function:", sizes);
        for (const plan_entry &e : entries)
            if (!strcmp(e.type, "bf16")) printf(" %s", e.function);
        printf("; type: f32, f16 or bf16. The call computes %s.\n", tensors);
        return argc > 1;
    }
    const int64_t cols = found->call(n);
    if (cols > 0) printf("a row has %lld bytes, %lld vectors of 16\n", (long long)cols * found->bytes, (long long)cols * found->bytes / 16);
    return cols < 0;
}

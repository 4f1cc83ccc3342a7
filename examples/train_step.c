// SPDX-License-Identifier: MIT
/* Training from C: a language model of one normalisation and one head learns which letter follows which.
 *
 *   h[t]    = embedding[letter t]                   copied by the host: a row a letter
 *   y       = srms_norm(h, norm weight)             lk_srms_norm_forward
 *   loss    = mean cross entropy of y head^T        lk_linear_cross_entropy_forward_backward, which makes dy and dhead too:
 *                                                   the head is the last step, so its gradients need not wait for a backward
 *   dh      and the gradient of the norm's weight   lk_srms_norm_backward
 *   descent of all three by the host, which a trainer would leave to a kernel of its optimiser.
 *
 * At first every letter is as likely as any other, and the loss is log 27 = 3.30 nats. A model that sees one letter cannot get
 * below the conditional entropy of the text: the average surprise of a letter when the previous one is known. It is counted.
 *
 *   make example-train_step      on a GPU, or on the CPU where there is none
 *
 * kernels.cu makes lk's functions; by hand, from the project's root:
 *
 *   nvcc -gencode arch=compute_90a,code=sm_90a -I. -c examples/kernels.cu
 *   gcc -std=c11 -I. -I/usr/local/cuda/include -c examples/train_step.c
 *   nvcc train_step.o kernels.o -lcublasLt -o train_step
 */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "lk/linear_cross_entropy.cuh"
#include "lk/srms_norm.cuh"

LK_DECLARE_LINEAR_CROSS_ENTROPY(f32)
LK_DECLARE_SRMS_NORM(f32)

static const char text[] =
    "the quick brown fox jumps over the lazy dog and the lazy dog sleeps on while the quick brown fox runs through the field "
    "and over the hill to the river where the water is cold and the fish are quick";

enum { TOKENS = sizeof text - 2, HIDDEN = 16, VOCAB = 27, STEPS = 30 }; /* the last letter has none to predict */

static const float rate = 1.0f, eps = 1e-6f;

/* A tensor in both memories. */
typedef struct {
    float *host, *device;
    size_t count;
} tensor;

static void check(const char *what, int status)
{
    if (status == 0) return;
    printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    exit(1);
}

/* `count` values around `mean`, with a spread. */
static tensor make(size_t count, float mean, float spread)
{
    static unsigned state = 1;
    tensor t = {.count = count, .host = malloc(count * sizeof(float))};
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        t.host[i] = mean + spread * ((float)(state >> 8) / 8388608.0f - 1.0f);
    }
    check("cudaMalloc", cudaMalloc((void **)&t.device, count * sizeof(float)));
    return t;
}

static void send(const tensor *t)
{
    check("send", cudaMemcpy(t->device, t->host, t->count * sizeof(float), cudaMemcpyHostToDevice));
}

/* Waits for what the device has been told to do, too. */
static void fetch(const tensor *t)
{
    check("fetch", cudaMemcpy(t->host, t->device, t->count * sizeof(float), cudaMemcpyDeviceToHost));
}

static void drop(const tensor *t)
{
    free(t->host);
    cudaFree(t->device);
}

static void descend(const tensor *parameter, const tensor *gradient)
{
    for (size_t i = 0; i < parameter->count; i++) parameter->host[i] -= rate * gradient->host[i];
}

static int letter(int t)
{
    return text[t] == ' ' ? 26 : text[t] - 'a';
}

/* In nats, of a letter when the one before it is known. */
static double conditional_entropy(void)
{
    static int pairs[VOCAB][VOCAB], firsts[VOCAB];
    double entropy = 0;
    for (int t = 0; t < TOKENS; t++) pairs[letter(t)][letter(t + 1)]++, firsts[letter(t)]++;
    for (int i = 0; i < VOCAB; i++)
        for (int j = 0; j < VOCAB; j++)
            if (pairs[i][j]) entropy -= pairs[i][j] * log((double)pairs[i][j] / firsts[i]) / TOKENS;
    return entropy;
}

int main(void)
{
    tensor embedding = make(VOCAB * HIDDEN, 0, 1), dembedding = make(VOCAB * HIDDEN, 0, 0); /* these two on the host only */
    tensor norm = make(HIDDEN, 1, 0), dnorm = make(HIDDEN, 0, 0), head = make(VOCAB * HIDDEN, 0, 0.05f);
    tensor dhead = make(VOCAB * HIDDEN, 0, 0), h = make(TOKENS * HIDDEN, 0, 0), dh = make(TOKENS * HIDDEN, 0, 0);
    tensor y = make(TOKENS * HIDDEN, 0, 0), rstd = make(TOKENS, 0, 0), loss = make(1, 0, 0);

    int32_t target_host[TOKENS], *target = NULL;
    for (int t = 0; t < TOKENS; t++) target_host[t] = letter(t + 1);
    check("cudaMalloc", cudaMalloc((void **)&target, sizeof target_host));
    check("cudaMemcpy", cudaMemcpy(target, target_host, sizeof target_host, cudaMemcpyHostToDevice));

    static lk_linear_cross_entropy_context context;
    check("init", lk_linear_cross_entropy_init(&context));
    lk_linear_cross_entropy_args loss_args = {
        .context = &context, .x = y.device, .weight = head.device, .target = target, .loss = loss.device, .dx = dh.device,
        .dweight = dhead.device, .tokens = TOKENS, .hidden = HIDDEN, .vocab = VOCAB, .reduction = LK_REDUCTION_MEAN,
        .target_dtype = LK_TARGET_INT32};
    lk_srms_norm_args norm_args = { /* for forward and backward */
        .x = h.device, .weight = norm.device, .y = y.device, .rstd = rstd.device, .dy = dh.device, .dx = dh.device, /* in place */
        .dweight = dnorm.device, .rows = TOKENS, .cols = HIDDEN, .eps = eps};

    /* One workspace is enough for both, since they run one after the other. */
    lk_linear_cross_entropy_plan plan;
    check("plan", lk_linear_cross_entropy_forward_backward_plan_f32(&loss_args, (size_t)1 << 20, &plan));
    check("query", lk_srms_norm_backward_workspace_bytes_f32(&norm_args, &norm_args.workspace_bytes));
    const size_t bytes = plan.workspace_bytes > norm_args.workspace_bytes ? plan.workspace_bytes : norm_args.workspace_bytes;
    void *workspace = NULL;
    check("cudaMalloc", cudaMalloc(&workspace, bytes));
    loss_args.workspace = workspace, loss_args.workspace_bytes = plan.workspace_bytes;
    norm_args.workspace = norm_args.workspace_bytes ? workspace : NULL;
    printf("%d letters; the head: %s\n", TOKENS, plan.text);

    const double floor = conditional_entropy();
    float first = 0, last = INFINITY;
    int rises = 0;
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < TOKENS * HIDDEN; i++) h.host[i] = embedding.host[letter(i / HIDDEN) * HIDDEN + i % HIDDEN];
        send(&h), send(&norm), send(&head);
        check("norm", lk_srms_norm_forward_f32(&norm_args, NULL));
        check("head", lk_linear_cross_entropy_forward_backward_f32(&loss_args, NULL));
        check("norm's backward", lk_srms_norm_backward_f32(&norm_args, NULL));
        fetch(&loss), fetch(&dhead), fetch(&dnorm), fetch(&dh);
        printf("step %2d  loss %.4f\n", step, (double)loss.host[0]);
        rises += !(loss.host[0] < last);
        last = loss.host[0], first = step == 0 ? last : first;

        for (size_t i = 0; i < dembedding.count; i++) dembedding.host[i] = 0;
        for (int i = 0; i < TOKENS * HIDDEN; i++) dembedding.host[letter(i / HIDDEN) * HIDDEN + i % HIDDEN] += dh.host[i];
        descend(&head, &dhead), descend(&norm, &dnorm), descend(&embedding, &dembedding);
    }

    check("destroy", lk_linear_cross_entropy_destroy(&context));
    drop(&embedding), drop(&dembedding), drop(&norm), drop(&dnorm), drop(&head), drop(&dhead), drop(&h), drop(&dh), drop(&y);
    drop(&rstd), drop(&loss), cudaFree(target), cudaFree(workspace);
    const int good = rises == 0 && fabs((double)first - log(VOCAB)) < 0.1 && last > floor && last < 1.5 * floor;
    printf("%s: the loss went from %.3f to %.3f nats in %d steps; no model of one letter gets below %.3f\n",
           good ? "all as expected" : "NOT as expected", (double)first, (double)last, STEPS, floor);
    return !good;
}

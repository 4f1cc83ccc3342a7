// SPDX-License-Identifier: MIT
/* Distillation from C: a small student learns the probabilities that a larger teacher gives to the next letter.
 *
 *   teacher   its hidden state is the letter itself, one of 27 numbers is 1; its head holds log(count + 1/10) of all pairs of
 *             letters of a text. So its probabilities are the counts, smoothed
 *   student   y[t] = embedding[letter t], 8 numbers; its head is 27 x 8
 *   loss      the mean over the letters of KL(teacher || student), and its gradients for embedding and head: one call of
 *             lk_linear_kl_forward_backward. The mean is row_weight, 1 / number of letters
 *   descent   of both by the host, which a trainer would leave to a kernel of its optimiser
 *
 * There are no targets: a teacher's probabilities say more than the letter that happened to come. With 8 numbers per letter the
 * student cannot hold all 27 x 27 probabilities, so the divergence falls and stays above 0. In the end it is computed again in
 * double, by the formula.
 *
 *   make example-distill         on a GPU, or on the CPU where there is none
 *
 * kernels.cu makes lk's functions; by hand, from the project's root:
 *
 *   nvcc -gencode arch=compute_90a,code=sm_90a -I. -c examples/kernels.cu
 *   gcc -std=c11 -I. -I/usr/local/cuda/include -c examples/distill.c
 *   nvcc distill.o kernels.o -lcublasLt -o distill
 */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "lk/linear_kl.cuh"

LK_DECLARE_LINEAR_KL(f32)

static const char text[] =
    "the quick brown fox jumps over the lazy dog and the lazy dog sleeps on while the quick brown fox runs through the field "
    "and over the hill to the river where the water is cold and the fish are quick";

enum { TOKENS = sizeof text - 2, HIDDEN = 8, VOCAB = 27, STEPS = 200 }; /* the last letter has no next one */

static const float rate = 4.0f;

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

/* `count` values around 0, with a spread. */
static tensor make(size_t count, float spread)
{
    static unsigned state = 1;
    tensor t = {.count = count, .host = malloc(count * sizeof(float))};
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        t.host[i] = spread * ((float)(state >> 8) / 8388608.0f - 1.0f);
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

/* log-probabilities of a letter's successors in double, from a hidden state and a head of either model. */
static void log_p_of(const float *x, const float *weight, int hidden, double log_p[VOCAB])
{
    double sum = 0;
    for (int j = 0; j < VOCAB; j++) {
        log_p[j] = 0;
        for (int d = 0; d < hidden; d++) log_p[j] += (double)x[d] * (double)weight[j * hidden + d];
        sum += exp(log_p[j]);
    }
    for (int j = 0; j < VOCAB; j++) log_p[j] -= log(sum);
}

int main(void)
{
    tensor embedding = make(VOCAB * HIDDEN, 0.5f), dembedding = make(VOCAB * HIDDEN, 0); /* these two on the host only */
    tensor head = make(VOCAB * HIDDEN, 0.5f), dhead = make(VOCAB * HIDDEN, 0);
    tensor y = make(TOKENS * HIDDEN, 0), dy = make(TOKENS * HIDDEN, 0);
    tensor teacher_y = make(TOKENS * VOCAB, 0), teacher_head = make(VOCAB * VOCAB, 0);
    tensor weight = make(TOKENS, 0), loss = make(TOKENS, 0);

    for (int t = 0; t < TOKENS; t++) {
        teacher_y.host[t * VOCAB + letter(t)] = 1;
        teacher_head.host[letter(t + 1) * VOCAB + letter(t)] += 1;
        weight.host[t] = 1.0f / TOKENS;
    }
    for (size_t i = 0; i < teacher_head.count; i++) teacher_head.host[i] = logf(teacher_head.host[i] + 0.1f);
    send(&teacher_y), send(&teacher_head), send(&weight);

    static lk_linear_kl_context context;
    check("init", lk_linear_kl_init(&context));
    lk_linear_kl_args args = {
        .context = &context, .x = y.device, .weight = head.device, .teacher_x = teacher_y.device,
        .teacher_weight = teacher_head.device, .row_weight = weight.device, .loss = loss.device, .dx = dy.device,
        .dweight = dhead.device, .tokens = TOKENS, .hidden = HIDDEN, .teacher_hidden = VOCAB, .vocab = VOCAB};
    lk_linear_kl_plan plan; /* a small budget, so that there are several chunks */
    check("plan", lk_linear_kl_forward_backward_plan_f32(&args, 40000, &plan));
    void *workspace = NULL;
    check("cudaMalloc", cudaMalloc(&workspace, plan.workspace_bytes));
    args.workspace = workspace, args.workspace_bytes = plan.workspace_bytes;
    printf("%d letters; both heads: %s\n", TOKENS, plan.text);

    double first = 0, last = 0;
    for (int step = 0; step <= STEPS; step++) {
        for (int i = 0; i < TOKENS * HIDDEN; i++) y.host[i] = embedding.host[letter(i / HIDDEN) * HIDDEN + i % HIDDEN];
        send(&y), send(&head);
        check("linear_kl", lk_linear_kl_forward_backward_f32(&args, NULL));
        fetch(&loss), fetch(&dhead), fetch(&dy);
        last = 0;
        for (int t = 0; t < TOKENS; t++) last += (double)loss.host[t];
        if (step % 20 == 0) printf("step %3d  KL(teacher || student) %.4f\n", step, last);
        if (step == 0) first = last;
        if (step == STEPS) break; /* the loss belongs to these parameters */

        for (size_t i = 0; i < dembedding.count; i++) dembedding.host[i] = 0;
        for (int i = 0; i < TOKENS * HIDDEN; i++) dembedding.host[letter(i / HIDDEN) * HIDDEN + i % HIDDEN] += dy.host[i];
        descend(&head, &dhead), descend(&embedding, &dembedding);
    }

    double expected = 0;
    for (int t = 0; t < TOKENS; t++) {
        double log_p[VOCAB], log_q[VOCAB];
        log_p_of(y.host + t * HIDDEN, head.host, HIDDEN, log_p);
        log_p_of(teacher_y.host + t * VOCAB, teacher_head.host, VOCAB, log_q);
        for (int j = 0; j < VOCAB; j++) expected += exp(log_q[j]) * (log_q[j] - log_p[j]) / TOKENS;
    }
    check("destroy", lk_linear_kl_destroy(&context));
    drop(&embedding), drop(&dembedding), drop(&head), drop(&dhead), drop(&y), drop(&dy), drop(&teacher_y), drop(&teacher_head);
    drop(&weight), drop(&loss), cudaFree(workspace);
    const int good = last < 0.15 * first && fabs(last - expected) < 1e-5;
    printf("%s: the divergence went from %.4f to %.6f nats in %d steps; in double it is %.6f\n",
           good ? "all as expected" : "NOT as expected", first, last, STEPS, expected);
    return !good;
}

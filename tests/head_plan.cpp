// SPDX-License-Identifier: MIT
/* tests/head_plan.cpp - lk/lk_head_plan.cuh by itself, with no CUDA: the plans of one call in words, and what holds of the plans of
 * all budgets and of 10^5 drawn shapes. tests/check runs it.
 *
 *     g++ -std=c++17 -I. tests/head_plan.cpp -o head_plan && ./head_plan
 */
#include <initializer_list>
#include <string.h>

#include "lk/lk_head_plan.cuh"

static int failed;

static void expect(bool holds, const char *what, size_t budget)
{
    if (!holds) failed++, printf("%s, budget %zu\n", what, budget);
}

/* forward_backward of 8192 tokens, hidden 4096, vocab 131072 in bf16, as a mean. */
static lk_head_shape shape_of(bool fused, int dweight_dtype)
{
    lk_head_shape s = {};
    s.rows = 8192, s.hidden = s.dweight_stride = 4096, s.vocab = s.classes = 131072;
    s.dweight = (void *)4096, s.dx = s.loss = s.mean = s.gives_loss = s.gradient = true;
    s.type = LK_DTYPE_BF16, s.logits_type = LK_DTYPE_F32, s.dweight_dtype = dweight_dtype;
    s.fused = fused, s.clusters = fused ? 66 : 1, s.why_not_fused = fused ? "" : ": there is no usable CUDA device";
    return s;
}

static void expect_text(const lk_head_shape &s, size_t mib, const char *text)
{
    lk_head_planner planner;
    lk_head_plan plan;
    char said[300];
    lk_head_plan_begin(&planner, &s);
    lk_head_choose(&planner, mib << 20, &plan);
    lk_head_describe(&s, &plan, said, sizeof said);
    expect(!strcmp(said, text), said, mib << 20);
}

/* A plan fits, is that of its own bytes too, and of stored logits it has no more matmuls than a plan of fewer
 * bytes. Fewer chunks of stored logits would not fit. No candidate is laid out twice while few are remembered. */
static void expect_plans(const lk_head_shape &s)
{
    lk_head_planner planner;
    int matmuls = 9;
    lk_head_plan_begin(&planner, &s);
    for (double bytes = (double)planner.least; bytes < 1e10; bytes *= 1.03) {
        const size_t budget = (size_t)bytes;
        lk_head_plan plan, again;
        planner.candidates = 0;
        lk_head_choose(&planner, budget, &plan);
        const lk_head_workspace w = lk_head_lay_out(&s, &plan, (void *)128);
        expect(plan.workspace_bytes <= budget, "more bytes than the budget", budget);
        const char *const end = (char *)128 + plan.workspace_bytes;
        expect((char *)w.cublas + plan.cublas_bytes <= end, "arrays end behind the workspace", budget);
        expect(s.fused || plan.matmuls <= matmuls, "more memory, and a matmul more", budget);
        matmuls = plan.matmuls;
        expect(planner.candidates > 0, "no candidate is remembered", budget);
        for (int i = 0; i < planner.candidates && planner.candidates <= LK_HEAD_CANDIDATES; i++)
            for (int j = 0; j < i; j++) {
                const lk_head_plan a = planner.seen[i], b = planner.seen[j];
                expect(a.path != b.path || a.chunk_tokens != b.chunk_tokens || a.panel_vocab != b.panel_vocab ||
                       a.slice_tokens != b.slice_tokens || a.kept_vocab != b.kept_vocab || a.lent_vocab != b.lent_vocab ||
                       a.f32_dx != b.f32_dx || a.rounds != b.rounds,
                       "a candidate is laid out twice", budget);
            }
        lk_head_choose(&planner, plan.workspace_bytes, &again);
        expect(again.workspace_bytes == plan.workspace_bytes && again.chunk_tokens == plan.chunk_tokens &&
               again.panel_vocab == plan.panel_vocab && again.kept_vocab == plan.kept_vocab,
               "its own bytes have another plan", budget);
        lk_head_plan fewer = plan; /* chunks */
        fewer.chunk_tokens =
            plan.chunks > 1 ? lk_head_equal(s.rows, lk_ceil_div(s.rows, plan.chunks - 1), 128) : plan.chunk_tokens;
        if (s.two_heads && plan.slice_tokens < 512) fewer.slice_tokens = 512; /* those of a chunk are about equal, so shorter */
        expect(plan.path == LK_HEAD_PATH_FUSED || plan.chunks == 1 || lk_head_need(&planner, &fewer) > budget,
               "fewer chunks fit", budget);
    }
}

/* Numbers from 0 to 1, the same in each run. */
static double draw(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (double)(state >> 11) * 0x1p-53;
}
static int64_t draw_size(double least, double most)
{
    return (int64_t)exp(log(least) + draw() * (log(most + 1.0) - log(least)));
}

/* The time of forward on FUSED as the planner sees it: rounds of all clusters, or of all blocks, and the tiles of a round. */
static double forward_time(const lk_head_shape &s, int64_t stretch)
{
    const int64_t pairs = lk_ceil_div(s.rows, LK_HEAD_PAIR_ROWS), tiles = lk_ceil_div(s.vocab, LK_HEAD_TILE_COLS);
    return (double)lk_ceil_div(pairs * lk_ceil_div(tiles, stretch), lk_head_at_once(&s, s.rows)) * ((double)stretch + 0.01);
}

/* forward on FUSED at drawn shapes and budgets: with enough memory within 1.02 of the best stretches; with more of it slower
 * by half a per cent at most, which fewer states are worth; the same plan in its own bytes. */
static void expect_forward(int draws)
{
    for (int i = 0; i < draws; i++) {
        lk_head_shape s = shape_of(true, LK_DTYPE_BF16);
        s.dweight = NULL, s.dx = s.gradient = s.mean = false;
        s.rows = draw_size(1, 40000), s.hidden = 8 * draw_size(1, 1000), s.vocab = s.classes = draw_size(1, 280000);
        s.path = LK_HEAD_PATH_FUSED, s.clusters = (int)draw_size(1, 74), s.split = draw() < 0.2;
        s.entropy = draw() < 0.5, s.argmax = draw() < 0.3, s.statistics = s.entropy && draw() < 0.5;
        lk_head_planner planner;
        lk_head_plan plan[3], again;
        lk_head_plan_begin(&planner, &s);
        const double more = exp(draw() * 6.0);
        const size_t some = (size_t)((double)planner.least * more);
        const size_t budgets[] = {some, (size_t)((double)some * (1.0 + draw())), (size_t)8 << 40};
        double time[3], best = INFINITY;
        for (int k = 0; k < 3; k++) {
            lk_head_choose(&planner, budgets[k], &plan[k]);
            time[k] = forward_time(s, lk_ceil_div(plan[k].panel_vocab, LK_HEAD_TILE_COLS));
            lk_head_choose(&planner, plan[k].workspace_bytes, &again);
            expect(plan[k].workspace_bytes <= budgets[k], "forward: more bytes than the budget", budgets[k]);
            expect(again.panel_vocab == plan[k].panel_vocab && again.workspace_bytes == plan[k].workspace_bytes,
                   "forward: its own bytes have another plan", budgets[k]);
            expect(k == 0 || time[k] <= time[k - 1] * 1.006, "forward: more memory, and slower", budgets[k]);
        }
        for (int64_t stretch = 1; stretch <= lk_ceil_div(s.vocab, LK_HEAD_TILE_COLS); stretch++)
            best = fmin(best, forward_time(s, stretch));
        expect(time[2] <= 1.02 * best, "forward: over 1.02 of the best", (size_t)s.rows);
    }
}

/* The arrays of a plan end before its workspace does: drawn shapes, with the caller's chunks and slices too, from the least budget on. */
static void expect_fits(int draws)
{
    for (int i = 0; i < draws; i++) {
        lk_head_shape s = shape_of(false, draw() < 0.5 ? LK_DTYPE_F32 : LK_DTYPE_BF16);
        s.rows = draw_size(1, 3000), s.hidden = draw_size(1, 300), s.vocab = s.classes = draw_size(1, 5000),
        s.dweight_stride = s.hidden;
        s.no_panels = draw() < 0.7, s.two_heads = s.no_targets = s.no_panels && draw() < 0.8, s.gives_loss = !s.two_heads;
        s.several_passes = s.two_heads && draw() < 0.5, s.accumulate = draw() < 0.2, s.dbias = draw() < 0.3;
        if (draw() < 0.5) s.chunk_tokens = draw_size(1, (double)s.rows);
        if (draw() < 0.3) s.slice_tokens = draw_size(1, (double)s.rows);
        if (draw() < 0.2) s.dweight = NULL;
        lk_head_planner planner;
        lk_head_plan plan;
        lk_head_plan_begin(&planner, &s);
        for (double bytes = (double)planner.least; bytes < 4.0 * (double)planner.least; bytes *= 1.0 + draw()) {
            lk_head_choose(&planner, (size_t)bytes, &plan);
            const lk_head_workspace w = lk_head_lay_out(&s, &plan, (void *)128);
            expect((char *)w.cublas + plan.cublas_bytes <= (char *)128 + plan.workspace_bytes,
                   "drawn: arrays end behind the workspace", (size_t)bytes);
        }
    }
}

int main()
{
    expect_forward(100000);
    expect_fits(20000);
    expect_text(shape_of(true, LK_DTYPE_BF16), 1024,
                "1 x 8192 tokens, 1 x 11520 columns, bf16 exponentials of logits of 119552 columns, "
                "60928 of them in dweight, 4 matmuls: exact");
    expect_text(shape_of(true, LK_DTYPE_F32), 64,
                "4 x 2048 tokens, 64 x 2048 columns, f32 logits, dweight summed in the caller's f32, "
                "4 matmuls: exact");
    expect_text(shape_of(false, LK_DTYPE_BF16), 1024,
                "1 x 8192 tokens, 8 x 16384 columns, f32 logits, 4 matmuls: exact; FUSED, for sm_90a, is left out"
                ": there is no usable CUDA device");
    for (int fused = 0; fused < 2; fused++)
        for (int dtype : {LK_DTYPE_F32, LK_DTYPE_BF16}) expect_plans(shape_of(fused, dtype));
    lk_head_shape rounded = shape_of(false, LK_DTYPE_BF16); /* 256 MiB, though f32 sums of dweight would take 2 GiB */
    rounded.no_panels = true, rounded.why_not_fused = "";
    expect_text(rounded, 256,
                "22 x 384 tokens, 1 x 131072 columns, f32 logits, dweight rounded after each chunk, 3 matmuls: exact");
    expect_plans(rounded);
    lk_head_shape two = rounded; /* as of linear_kl */
    two.two_heads = two.no_targets = true, two.gives_loss = false;
    expect_text(two, 1024,
                "5 x 1640 tokens, 1 x 131072 columns, f32 logits of 448 tokens at a time, dweight rounded after each chunk, "
                "4 matmuls: exact");
    expect_text(two, 2400,
                "1 x 8192 tokens, 1 x 131072 columns, f32 logits of 1024 tokens at a time in dweight, 4 matmuls: exact");
    expect_plans(two);
    two.several_passes =
        true; /* a rank's: one slice has all tokens, so no logits are computed again; where it does not fit, as above */
    expect_text(two, 2400,
                "1 x 8192 tokens, 1 x 131072 columns, f32 logits of 1024 tokens at a time in dweight, 4 matmuls: exact");
    two.vocab = two.classes = 32768;
    expect_text(two, 3000, "1 x 8192 tokens, 1 x 32768 columns, f32 logits of 8192 tokens at a time, 4 matmuls: exact");
    expect_plans(two);
    lk_head_shape weighted = shape_of(true, LK_DTYPE_BF16);
    const lk_head_plan plan = lk_head_fused_plan(weighted.rows, weighted.vocab, 0, weighted.vocab);
    const size_t bytes = lk_head_lay_out(&weighted, &plan, NULL).bytes;
    weighted.row_weight = true;
    expect(lk_head_lay_out(&weighted, &plan, NULL).bytes == bytes + 4 * 8192, "row weights take 4 bytes a row", bytes);
    expect_plans(weighted);
    return failed != 0;
}

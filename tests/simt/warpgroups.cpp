// SPDX-License-Identifier: MIT
/*
Warpgroups: wgmma, a product of 128 threads from shared memory.

A wgmma is a *product*. Its threads do not wait for one another: each stores its request and continues. When the last of the 128
has issued it, the engine reads the operands and multiplies, into a tile that stands for the registers of all. From the issue to
the wait, the sums in the threads' own variables are poison. A thread that waits parks until the product is done: lazily, when
nothing else of the group can run; eagerly, as soon as all have issued it; else at random. Until then the operands must not
change. The first thread that passes the wait makes a wgmma done for its whole warpgroup.

Products are added in float in the order of k, so that a plain loop gives the same bits. TSan sees five readers of the operands:
each warp, after that warp's issue, and one that only fences and landings order.

Not simulated: how tensor cores round, types other than bf16, swizzles other than 128 bytes, setmaxnreg.
*/
#include "engine.h"

#include <sys/mman.h>

#include <algorithm>

enum {
    MAX_PRODUCTS = 64,                  // wgmma of a warpgroup that are not done. A power of two
    MAX_SUMS = 8,                       // arrays of sums that these write
    MAX_ATOMS = 40,                     // of 1024 bytes, that a wgmma reads
    MAX_CHUNKS = 2 * (64 + 256),        // of 16 bytes
};

struct span {
    const char *at;
    size_t bytes;
};

struct operand {                        // a matrix descriptor, read
    const char *base;
    unsigned leading, stride, extent;   // extent: 64 rows of A, n columns of B
    int transposed;
};

struct sums {                           // registers that wgmma which are not done write
    int n;
    unsigned holders, last[WARPGROUP];  // last: per thread, 1 + the number of its last wgmma there
    float *d[WARPGROUP];                // per thread: its registers, NULL while it may touch them
    float tile[64 * 256];               // what will be in them, row by row, n columns each
};

struct product {                        // a wgmma, from its first thread's issue until it is done
    uint64_t a, b;
    int n, transpose_a, transpose_b, accumulate, in_registers;
    unsigned arrived, atoms, chunks, chunks_of_a;
    operand operands[2];
    struct sums *sums;
    wait_site site;
    span atom[MAX_ATOMS];
    float fragment[64 * 16];            // A from registers
    uint64_t raw[2 * MAX_CHUNKS];       // what it has read
};

struct warpgroup {
    unsigned issued, done, parked;      // products; threads that wait
    char issue_tag[MAX_PRODUCTS][4], done_tag[MAX_PRODUCTS];    // issue_tag: one per warp
    struct fiber *threads;
    float left[64 * 16], right[16 * 256];   // operands of the one being multiplied
    product products[MAX_PRODUCTS];     // by number
    sums all_sums[MAX_SUMS];
};

static unsigned warpgroup_index(const fiber *f) { return f->block->rank * MAX_WARPGROUPS + f->index / WARPGROUP; }
static warpgroup *find_warpgroup(const fiber *f) { return f->block->group->warpgroups[warpgroup_index(f)]; }

/* Chunk number `i` of an operand, 16 bytes. Chunks are in order along K, or along M or N where the operand is transposed. */
static const char *chunk_at(const operand *o, unsigned i) {
    const char *linear;
    if (o->transposed) {
        const unsigned k = i / (o->extent / 8), c = i % (o->extent / 8);
        linear = o->base + c / 8 * (size_t)o->leading + c % 8 * 16 + k / 8 * (size_t)o->stride + k % 8 * 128;
    } else {
        linear = o->base + i / 16 * (size_t)o->stride + i / 2 % 8 * 128 + i % 2 * 16;
    }
    return swizzled(linear, 128);
}

static void add_atom(product *p, const char *at) {
    if (p->atoms && p->atom[p->atoms - 1].at + p->atom[p->atoms - 1].bytes == at) p->atom[p->atoms - 1].bytes += 1024;
    else p->atom[p->atoms++] = {at, 1024};
}

/* Reads a descriptor, and finds the atoms of 1024 bytes that the operand lies in. */
static operand read_descriptor(product *p, uint64_t d, int extent, int transposed, const char *name) {
    const wait_site *site = &p->site;
    block *blk = simt_me->self->block;
    const unsigned start = (d & 0x3fff) << 4, leading = (d >> 16 & 0x3fff) << 4, stride = (d >> 32 & 0x3fff) << 4;
    if (d >> 62 != 1 || (d >> 49 & 7))
        simt_fail(site->file, site->line, "%s: descriptor %s is not of a 128-byte swizzle with a base offset of 0", site->what,
                  name);
    if (start % 1024 >= 128 || (start % 128 && (transposed || start % 32)))
        simt_fail(site->file, site->line, "%s: descriptor %s starts %u bytes behind a multiple of 1024, where %s", site->what,
                  name, start % 1024, transposed ? "an operand that is not K-major has to start" : "it may be 0, 32, 64 or 96");
    const bool far_leading = transposed && extent > 64;
    const bool wrong = !stride || stride % 1024, wrong_leading = far_leading && (!leading || leading % 1024);
    if (wrong || wrong_leading)
        simt_fail(site->file, site->line, "%s: descriptor %s has %u bytes from atom to atom, not a multiple of 1024",
                  site->what, name, wrong ? stride : leading);
    operand o = {blk->memory + start, leading, stride, (unsigned)extent, transposed};
    const unsigned before = p->atoms;
    const char *first = blk->memory + start / 1024 * 1024;
    if (transposed) {
        for (int m = 0; m < extent; m += 64)
            for (int k = 0; k < 2; k++) add_atom(p, first + m / 64 * (size_t)leading + k * (size_t)stride);
    } else {
        for (int row = 0; row < extent; row += 8) add_atom(p, first + row / 8 * (size_t)stride);
    }
    for (unsigned i = before ? before - 1 : 0; i < p->atoms; i++) {
        size_t offset, room;
        const char *variable = simt_find_variable(blk->group, p->atom[i].at, &offset, &room);
        if (!variable || block_of(blk->group, p->atom[i].at) != blk || room < p->atom[i].bytes)
            simt_fail(site->file, site->line, "%s: descriptor %s leads to %zu bytes at %s, past the end of a shared variable",
                      site->what, name, p->atom[i].bytes, simt_place_name(blk->group, p->atom[i].at));
    }
    return o;
}

static float from_bf16(unsigned bits) {
    const uint32_t word = bits << 16;
    float x;
    __builtin_memcpy(&x, &word, 4);
    return x;
}

/* An operand's chunks as floats: rows of 16 for A, whose columns are then its k; 16 rows of n for B. */
PLAIN_LOOP static void unpack(const operand *o, const uint64_t *raw, float *to, bool is_a) {
    const unsigned each = o->extent / 8, step_of_row = is_a ? 16 : 1, step_of_k = is_a ? 1 : o->extent;
    for (unsigned i = 0; i < 2 * o->extent; i++, raw += 2) {
        const unsigned row = o->transposed ? i % each * 8 : i / 2, k = o->transposed ? i / each : i % 2 * 8;
        float *at = to + row * step_of_row + k * step_of_k;
        const unsigned step = o->transposed ? step_of_row : step_of_k;
        for (unsigned j = 0; j < 8; j++) at[j * step] = from_bf16(raw[j / 4] >> (j % 4 * 16) & 0xffff);
    }
}

typedef float eight_floats __attribute__((vector_size(32), aligned(4), may_alias));
#if defined(__x86_64__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx2", "default"))) // not fma: a product is rounded before it is added
#else
#define FOR_EACH_CPU
#endif

/* tile += a b over 16 values of k in their order, or tile = a b; rows of n. */
FOR_EACH_CPU static void multiply(float *tile, const float *a, const float *b, int n, int accumulate) {
    for (int column = 0; column < n; column += 16)
        for (int row = 0; row < 64; row += 2) {
            eight_floats sum[2][2];
            for (int r = 0; r < 2; r++)
                for (int c = 0; c < 2; c++)
                    sum[r][c] = accumulate ? *(const eight_floats *)(tile + (row + r) * n + column + 8 * c) : eight_floats{};
            for (int k = 0; k < 16; k++) {
                const float *right = b + k * n + column;
                for (int r = 0; r < 2; r++) {
                    const float left = a[(row + r) * 16 + k];
                    for (int c = 0; c < 2; c++) sum[r][c] += left * *(const eight_floats *)(right + 8 * c);
                }
            }
            for (int r = 0; r < 2; r++)
                for (int c = 0; c < 2; c++) *(eight_floats *)(tile + (row + r) * n + column + 8 * c) = sum[r][c];
        }
}

/* All have issued it: reads and multiplies. The operands must have landed, with a proxy fence after the threads' writes. */
static void execute(warpgroup *wg, product *p, void *pc) {
    block *blk = simt_me->self->block;
    const wait_site *site = &p->site;
    for (unsigned i = 0; i < p->atoms; i++) {
        simt_check_landed(p->atom[i].at, p->atom[i].bytes, site->what, site->file, site->line);
        const written state = simt_written_since(blk, p->atom[i].at, p->atom[i].bytes);
        if (state == UNFENCED)
            simt_fail_all(site->file, site->line, "%s: threads wrote to %s and none has executed fence.proxy.async since",
                          site->what, simt_place_name(blk->group, p->atom[i].at));
        if (state == FENCED) simt_take_note(blk, p->atom[i].at, p->atom[i].bytes);
    }
    for (unsigned i = 0; i < p->chunks; i++) {
        const uint64_t *from = i < p->chunks_of_a ? (const uint64_t *)chunk_at(&p->operands[0], i)
                                                  : (const uint64_t *)chunk_at(&p->operands[1], i - p->chunks_of_a);
        p->raw[2 * i] = from[0];
        p->raw[2 * i + 1] = from[1];
    }
    if (!p->in_registers) unpack(&p->operands[0], p->raw, wg->left, true);
    unpack(&p->operands[1], p->raw + 2 * p->chunks_of_a, wg->right, false);
    multiply(p->sums->tile, p->in_registers ? p->fragment : wg->left, wg->right, p->n, p->accumulate);
#if defined(SIMT_TSAN)
    // Each warp reads its 16 rows of A and all of B after its own issue. A fifth reader, ordered by fences alone, reads all.
    const unsigned slot = (unsigned)(p - wg->products);
    for (unsigned reader = 0; reader < 5; reader++) {
        simt_become_copier(reader < 4 ? READER : FENCED_READER, &wg->issue_tag[slot][reader % 4]);
        for (unsigned i = 0; i < p->chunks; i++) {
            const operand *o = &p->operands[i >= p->chunks_of_a];
            const unsigned number = i < p->chunks_of_a ? i : i - p->chunks_of_a;
            const unsigned row = o->transposed ? number % (o->extent / 8) * 8 : number / 2;
            if (reader < 4 && i < p->chunks_of_a && row / 16 != reader) continue;
            touch(chunk_at(o, number), 16, false, pc);
        }
        simt_end_copier(&wg->done_tag[slot]);
    }
#endif
    (void)pc;
}

/* The products up to number `upto` are done, unless a thread or copy has changed what they read. */
static void finish_up_to(warpgroup *wg, unsigned upto) {
    group *g = wg->threads->block->group;
    for (; wg->done < upto; wg->done++) {
        const product *p = &wg->products[wg->done % MAX_PRODUCTS];
        for (unsigned i = 0; i < p->chunks; i++) {
            const uint64_t *at = i < p->chunks_of_a ? (const uint64_t *)chunk_at(&p->operands[0], i)
                                                    : (const uint64_t *)chunk_at(&p->operands[1], i - p->chunks_of_a);
            if (p->raw[2 * i] == at[0] && p->raw[2 * i + 1] == at[1]) continue;
            simt_fail_all(p->site.file, p->site.line, "%s: its operand, %s, was written to before the wait", p->site.what,
                          simt_place_name(g, at));
            return;
        }
        simt_me->progress++;
    }
    for (unsigned i = 0; wg->parked && i < WARPGROUP; i++) {
        fiber *f = &wg->threads[i];
        if (f->state != IN_WGMMA || f->products_needed > wg->done) continue;
        wg->parked--;
        g->products_parked--;
        set_ready(g, f->warp, 1u << f->lane);
    }
}

static bool all_issued(const warpgroup *wg, unsigned upto) {
    return wg->done >= upto || wg->products[(upto - 1) % MAX_PRODUCTS].arrived == WARPGROUP;
}

bool simt_finish_products(worker *w, group *g) {
    const unsigned count = g->block_count * MAX_WARPGROUPS;
    const unsigned from = simt_copies == RANDOM_COPIES ? random_number(&w->copy_random) % count : 0;
    for (unsigned n = 0; g->products_parked && n < count; n++) {
        warpgroup *wg = g->warpgroups[(from + n) % count];
        if (!wg || !wg->parked) continue;
        unsigned needed = ~0u;
        for (unsigned i = 0; i < WARPGROUP; i++)
            if (wg->threads[i].state == IN_WGMMA) needed = std::min(needed, wg->threads[i].products_needed);
        if (!all_issued(wg, needed)) continue;
        finish_up_to(wg, needed);
        return true;
    }
    return false;
}

unsigned simt_wgmma_address(const void *shared, const char *file, int line) {
    const char *what = "a matrix descriptor";
    const size_t offset = (const char *)shared - simt_me->self->block->memory;
    if (offset >= simt_me->group->memory_stride)
        simt_fail(file, line, "%s: %p is not in this block's shared memory", what, shared);
    if (offset % 16) simt_fail(file, line, "%s: %s is not aligned to 16 bytes", what, simt_place_name(simt_me->group, shared));
    if (offset >> 18) simt_fail(file, line, "%s: %s is beyond 256 KiB", what, simt_place_name(simt_me->group, shared));
    return (unsigned)offset;
}

void simt_wgmma_fence(const char *, int) { simt_me->self->wgmma_fences++; }

/* The element of a thread's i-th sum in a tile of rows of n. */
static unsigned sum_at(unsigned thread, int i, int n) {
    return (thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8) * n + i / 4 * 8 + thread % 4 * 2 + i % 2;
}

static const uint32_t POISON_SUM = 0xffffffffu;         // a NaN

/* The sums d, until now the thread's own, become those of a product. */
static void lend_sums(fiber *f, sums *to, float *d, const product *p) {
    const unsigned t = f->index % WARPGROUP;
    const wait_site *site = &p->site;
    const held_sums *held = NULL;
    for (const held_sums &h : f->held)
        if (h.d == d) held = &h;
    if (!f->wgmma_fences) simt_fail_all(site->file, site->line, "%s: no wgmma.fence before the first wgmma", site->what);
    if (held && held->fences == f->wgmma_fences && (!p->accumulate || simt_hash(d, p->n * 2) != held->hash))
        simt_fail_all(site->file, site->line, "%s: thread %u has touched its sums since the wait, and no wgmma.fence follows",
                      site->what, f->index);
    to->d[t] = d;
    to->holders++;
    for (int i = 0; i < p->n / 2; i++) {
        if (p->accumulate) to->tile[sum_at(t, i, p->n)] = d[i];
        ((volatile uint32_t *)d)[i] = POISON_SUM;
    }
}

/* The thread has waited: it gets its sums. */
static void return_sums(fiber *f, sums *from, const char *file, int line) {
    const unsigned t = f->index % WARPGROUP;
    float *d = from->d[t];
    for (int i = 0; i < from->n / 2; i++) {
        if (((volatile uint32_t *)d)[i] != POISON_SUM)
            simt_fail_all(file, line,
                          "wgmma.wait_group: thread %u has written to its sums, d[%d], while a wgmma was on its way to them",
                          f->index, i);
        d[i] = from->tile[sum_at(t, i, from->n)];
    }
    from->d[t] = NULL;
    from->holders--;
    unsigned slot = 0;
    while (slot < MAX_HELD && f->held[slot].d != d) slot++;
    if (slot == MAX_HELD) slot = f->held_turn++ % MAX_HELD;
    f->held[slot] = {d, simt_hash(d, from->n * 2), f->wgmma_fences};
}

/* The first thread to issue a product fills in what the others must agree with. */
static void begin_product(warpgroup *wg, product *p, const float *d, uint64_t a, uint64_t b, unsigned t) {
    const wait_site *site = &p->site;
    p->a = a;
    p->b = b;
    p->arrived = p->atoms = 0;
    p->chunks_of_a = p->in_registers ? 0 : 2 * 64;
    p->chunks = p->chunks_of_a + 2 * p->n;
    if (!p->in_registers) p->operands[0] = read_descriptor(p, a, 64, p->transpose_a, "a");
    p->operands[1] = read_descriptor(p, b, p->n, p->transpose_b, "b");
    p->sums = NULL;
    for (sums &x : wg->all_sums)
        if (x.holders && x.d[t] == d) p->sums = &x;
    for (sums &x : wg->all_sums) {
        if (p->sums || x.holders) continue;
        p->sums = &x;
        x.n = p->n;
        for (float *&other : x.d) other = NULL;
    }
    if (!p->sums)
        simt_fail(site->file, site->line, "%s: on its way to more than %d arrays of sums at once", site->what, MAX_SUMS);
}

void simt_wgmma(int n, int transpose_a, int transpose_b, float *d, uint64_t a, const uint32_t *registers, uint64_t b,
                int accumulate, const char *file, int line) {
    const char *what = registers ? "wgmma.mma_async with A in registers" : "wgmma.mma_async";
    fiber *f = simt_me->self;
    const unsigned t = f->index % WARPGROUP, number = f->products, slot = number % MAX_PRODUCTS;
    accumulate = accumulate != 0;
    maybe_switch();
    if (f->index - t + WARPGROUP > f->block->threads)
        simt_fail(file, line, "%s: the warpgroup of thread %u has only %u threads", what, f->index,
                  f->block->threads - (f->index - t));
    warpgroup **place = &f->block->group->warpgroups[warpgroup_index(f)];
    if (!*place) {                                      // not malloc: TSan would see the running fiber in it
        *place = (warpgroup *)mmap(NULL, sizeof **place, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                                   -1, 0);
        if (*place == (warpgroup *)MAP_FAILED) simt_fail(file, line, "%s: no memory", what);
    }
    warpgroup *wg = *place;
    wg->threads = f - t;
    product *p = &wg->products[slot];
    if (number == wg->issued) {
        if (number - wg->done == MAX_PRODUCTS)
            simt_fail(file, line, "%s: more than %d that nobody has waited for", what, MAX_PRODUCTS);
        p->site = {what, file, line};
        p->n = n, p->transpose_a = transpose_a, p->transpose_b = transpose_b, p->accumulate = accumulate;
        p->in_registers = registers != NULL;
        begin_product(wg, p, d, a, b, t);
        wg->issued++;
    } else if (p->site.line != line || !same_file(p->site.file, file)) {
        simt_fail_all(file, line,
                      "divergent wgmma: number %u of its warpgroup is this one for thread %u and the one at %s:%d for others",
                      number, f->index, base_name(p->site.file), p->site.line);
    } else if (p->n != n || p->a != a || p->b != b || p->accumulate != accumulate || p->transpose_a != transpose_a
               || p->transpose_b != transpose_b) {
        simt_fail_all(file, line, "divergent wgmma: thread %u passes %s than others of its warpgroup", f->index,
                      p->a != a || p->b != b ? "other descriptors" : "another shape or accumulate");
    }
    sums *to = p->sums;
    for (sums &x : wg->all_sums)
        if (x.holders && x.d[t] == d && &x != to)
            simt_fail_all(file, line, "divergent wgmma: thread %u passes other sums than others of its warpgroup", f->index);
    if (to->d[t] && (to->d[t] != d || to->n != n))
        simt_fail_all(file, line, "%s: thread %u passes other sums, or sums of another shape, than those on their way", what,
                      f->index);
    if (registers) {
        if (f->wgmma_fences == f->fences_at_wait)
            simt_fail_all(file, line, "%s: no wgmma.fence between the last wait and this use of registers for A", what);
        for (unsigned i = 0; i < 8; i++)
            p->fragment[(t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) * 16 + i / 4 * 8 + t % 4 * 2 + i % 2] =
                from_bf16(registers[i / 2] >> (i % 2 * 16) & 0xffff);
    }
    if (!to->d[t]) lend_sums(f, to, d, p);
    to->last[t] = ++f->products;
    release(&wg->issue_tag[slot][t / 32]);
    if (++p->arrived == WARPGROUP) execute(wg, p, __builtin_return_address(0));
}

void simt_wgmma_commit(const char *, int) {
    fiber *f = simt_me->self;
    f->product_commits[f->product_groups++ % MAX_COMMITS] = f->products;
}

void simt_wgmma_wait(unsigned groups, const char *file, int line) {
    const char *what = "wgmma.wait_group";
    fiber *f = simt_me->self;
    warpgroup *wg = find_warpgroup(f);
    maybe_switch();
    note_site(f, what, file, line);
    const unsigned committed = f->product_groups ? f->product_commits[(f->product_groups - 1) % MAX_COMMITS] : 0;
    if (!groups && f->products != committed)
        simt_fail_all(file, line, "%s: thread %u has issued %u wgmma that it has not committed to a group", what, f->index,
                      f->products - committed);
    f->fences_at_wait = f->wgmma_fences;
    if (f->product_groups <= groups) return;
    const unsigned needed = f->product_commits[(f->product_groups - groups - 1) % MAX_COMMITS];
    if (needed <= f->products_waited) return;
    if (wg->done < needed) {
        const bool now = simt_copies == EAGER || (simt_copies == RANDOM_COPIES && !(random_number(&simt_me->copy_random) & 3));
        if (now && all_issued(wg, needed)) {
            finish_up_to(wg, needed);
        } else {
            f->products_needed = needed;
            wg->parked++;
            simt_me->group->products_parked++;
            simt_block_fiber(f, IN_WGMMA);
        }
    }
    for (; f->products_waited < needed; f->products_waited++) acquire(&wg->done_tag[f->products_waited % MAX_PRODUCTS]);
    const unsigned t = f->index % WARPGROUP;
    for (sums &x : wg->all_sums)
        if (x.holders && x.d[t] && x.last[t] <= needed) return_sums(f, &x, file, line);
}

void simt_check_products_of_thread(fiber *f) {
    const warpgroup *wg = find_warpgroup(f);
    const unsigned committed = f->product_groups ? f->product_commits[(f->product_groups - 1) % MAX_COMMITS] : 0;
    const wait_site *site = &wg->products[f->products_waited % MAX_PRODUCTS].site;
    simt_fail_all(site->file, site->line, "%s: thread %u exits and has not %s", site->what, f->index,
                  f->products_waited >= committed ? "committed it to a group" : "waited for its group");
}

void simt_prepare_products(group *g) {
    g->products_parked = 0;
    for (warpgroup *wg : g->warpgroups) {
        if (!wg) continue;
        wg->issued = wg->done = wg->parked = 0;
        for (sums &x : wg->all_sums) x.holders = 0;
    }
}

void simt_check_operands(const char *to, size_t bytes, const char *what, const char *file, int line) {
    group *g = simt_me->group;
    warpgroup *const *own = &g->warpgroups[block_of(g, to)->rank * MAX_WARPGROUPS];
    for (unsigned i = 0; i < MAX_WARPGROUPS; i++) {
        const warpgroup *wg = own[i];
        for (unsigned n = wg ? wg->done : 0; wg && n < wg->issued; n++) {
            const product *p = &wg->products[n % MAX_PRODUCTS];
            for (unsigned j = 0; j < p->atoms; j++) {
                const span *atom = &p->atom[j];
                if (!overlap(to, bytes, atom->at, atom->bytes)) continue;
                simt_fail_all(file, line, "%s: %s is an operand of the wgmma issued at %s:%d, which has not been waited for",
                              what, simt_place_name(g, atom->at < to ? to : atom->at), base_name(p->site.file), p->site.line);
            }
        }
    }
}

void simt_report_wgmma_deadlock(const fiber *f) {
    const wait_site *here = &f->warp->site[f->lane];
    const product *p = &find_warpgroup(f)->products[(f->products_needed - 1) % MAX_PRODUCTS];
    simt_fail_all(here->file, here->line,
                  "deadlock: %u threads wait for what cannot come, thread %u of block rank %u here for the wgmma at %s:%d, "
                  "which %u of its warpgroup's threads have issued", f->block->group->live, f->index, f->block->rank,
                  base_name(p->site.file), p->site.line, p->arrived);
}

// SPDX-License-Identifier: MIT
/*
Fibers and schedules: how the threads of a kernel run on the CPU, and in which order.

A CUDA thread is a fiber: a stack of its own, and a switch by hand that takes a few nanoseconds. A worker (an OS thread) takes
the next group of the grid (a cluster, or one block), gives each of its threads a fiber, and switches to the first. A fiber runs
until it has to wait. Then it leaves the ready mask of its warp and switches to the next ready fiber of the group: the first,
the last or any one, by schedule. Only when none is ready does it switch back to the worker's own stack. There run_round() lets
copies land and wgmma complete, wakes fibers that yielded, retires a group that has ended, or reports a deadlock. Where all
groups only spin, work() starts another one.

Not simulated: warps in lockstep, the real order of a GPU's schedulers, programmatic dependent launch. A grid starts when the
previous one has ended.
*/
#include "engine.h"

#include <sched.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

__thread const simt_coordinates *simt_here __attribute__((tls_model("initial-exec")));
__thread worker *simt_me __attribute__((tls_model("initial-exec")));

order simt_schedule;
static uint64_t schedule_seed;
static int schedule_known;
static uint64_t launch_count;

copy_order simt_copies;
static uint64_t copies_seed;
static char copies_asked[64];
static int copies_known;

static const uint64_t FINISHED = ~0ull, NOT_STUCK = ~0ull - 1;      // values of stuck_at that are no progress

/* ---- schedules ------------------------------------------------------------------------------------------------------- */

void simt_set_schedule(const char *text) {
    if (!text) text = getenv("SIMT_SCHEDULE");
    if (!text || !*text) text = "forward";
    schedule_known = 1;
    if (!strcmp(text, "forward")) simt_schedule = FORWARD;
    else if (!strcmp(text, "reverse")) simt_schedule = REVERSE;
    else if (!strncmp(text, "random", 6) && (!text[6] || text[6] == ':')) {
        simt_schedule = RANDOM;
        schedule_seed = text[6] ? strtoull(text + 7, NULL, 0) : 1;
    } else {
        fprintf(stderr, "simt: SIMT_SCHEDULE is forward, reverse or random:SEED, not \"%s\"\n", text);
        exit(2);
    }
}

void simt_set_copies(const char *text) {
    if (!text) text = getenv("SIMT_COPIES");
    if (!text) text = "";
    copies_known = 1;
    snprintf(copies_asked, sizeof copies_asked, "%s", text);
    if (!*text || !strcmp(text, "lazy") || !strcmp(text, "eager") || !strncmp(text, "random:", 7) || !strcmp(text, "random"))
        return;
    fprintf(stderr, "simt: SIMT_COPIES is lazy, eager or random:SEED, not \"%s\"\n", text);
    exit(2);
}

/* The order of this launch's copies: what SIMT_COPIES says, else the one that belongs to the schedule. */
static void choose_copies(void) {
    if (!copies_known) simt_set_copies(NULL);
    copies_seed = schedule_seed;
    if (!*copies_asked) simt_copies = simt_schedule == FORWARD ? LAZY : simt_schedule == REVERSE ? EAGER : RANDOM_COPIES;
    else if (*copies_asked == 'l') simt_copies = LAZY;
    else if (*copies_asked == 'e') simt_copies = EAGER;
    else simt_copies = RANDOM_COPIES, copies_seed = copies_asked[6] ? strtoull(copies_asked + 7, NULL, 0) : 1;
}

static uint64_t next_random(worker *w) { return random_number(&w->random); }

/* Index of a set bit: the lowest, the highest, or the first one at or after a random index. */
static unsigned choose_bit(worker *w, uint64_t bits, unsigned width) {
    if (simt_schedule == FORWARD) return __builtin_ctzll(bits);
    if (simt_schedule == REVERSE) return 63 - __builtin_clzll(bits);
    unsigned from = next_random(w) % width;
    uint64_t upper = bits & (~0ull << from);
    return __builtin_ctzll(upper ? upper : bits);
}

static fiber *choose_fiber(worker *w, group *g) {
    warp *wp = &g->warps[g->current_warp];
    // Stay with a warp while it can run: its 32 stacks are in the cache. A random schedule leaves it now and then.
    if (!wp->ready || (simt_schedule == RANDOM && !(next_random(w) & 3))) {
        unsigned words = (g->warp_count + 63) / 64, found = words;
        if (simt_schedule == FORWARD) {
            for (found = 0; found < words && !g->ready_warps[found]; found++);
        } else if (simt_schedule == REVERSE) {
            for (unsigned i = words; i-- > 0 && found == words;) if (g->ready_warps[i]) found = i;
        } else {
            unsigned from = next_random(w) % words;
            for (unsigned i = 0; i < words && found == words; i++)
                if (g->ready_warps[(from + i) % words]) found = (from + i) % words;
        }
        if (found == words) return NULL;
        g->current_warp = found * 64 + choose_bit(w, g->ready_warps[found], 64);
        wp = &g->warps[g->current_warp];
    }
    return &wp->lanes[choose_bit(w, wp->ready, 32)];
}

/* ---- fibers ---------------------------------------------------------------------------------------------------------- */

extern "C" void simt_fiber_main(void);

#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)
/* Saves the callee-saved registers and the stack pointer, loads the other's. */
extern "C" void simt_switch(void **save, void *load);
asm(R"(
    .text
    .p2align 4
    .globl simt_switch
    .type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size simt_switch, .-simt_switch
)");
static void *first_frame(char *top) {
    void **sp = (void **)top;
    *--sp = NULL;                           // the return address of simt_fiber_main: ends a backtrace
    *--sp = (void *)simt_fiber_main;
    for (int i = 0; i < 6; i++) *--sp = NULL;
    return sp;
}
#elif defined(__aarch64__) && !defined(SIMT_UCONTEXT)
extern "C" void simt_switch(void **save, void *load);
asm(R"(
    .text
    .p2align 4
    .globl simt_switch
    .type simt_switch, %function
simt_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size simt_switch, .-simt_switch
)");
static void *first_frame(char *top) {
    void **sp = (void **)(top - 160);
    for (int i = 0; i < 20; i++) sp[i] = NULL;
    sp[11] = (void *)simt_fiber_main;       // x30
    return sp;
}
#else
#include <ucontext.h>
/* For other processors: about 20 times slower, since swapcontext calls the kernel for the signal mask. */
void simt_switch(void **save, void *load) {
    ucontext_t here;
    *save = &here;
    swapcontext(&here, (ucontext_t *)load);
}
static void *first_frame(char *top) {
    ucontext_t *context = (ucontext_t *)((uintptr_t)(top - sizeof(ucontext_t)) & ~(uintptr_t)63);
    getcontext(context);
    char *low = (char *)(((uintptr_t)top - STACK_BYTES / 2) & ~(uintptr_t)63);
    context->uc_stack.ss_sp = low;
    context->uc_stack.ss_size = (char *)context - low;
    context->uc_link = NULL;
    makecontext(context, simt_fiber_main, 0);
    return context;
}
#endif

/* Switches to fiber `to`, or to the worker's own stack if NULL; `dying`: the caller never runs again. */
static void switch_to(worker *w, fiber *to, bool dying) {
    fiber *from = w->self;
    w->self = to;
    simt_here = to ? &to->here : NULL;
#if defined(SIMT_TSAN)
    __tsan_switch_to_fiber(to ? to->tsan : w->tsan, 1);         // 1: a switch orders nothing
#endif
#if defined(SIMT_ASAN)
    void **fake = from ? &from->fake_stack : &w->fake_stack;
    if (to) __sanitizer_start_switch_fiber(dying ? NULL : fake, to->stack, STACK_BYTES);
    else __sanitizer_start_switch_fiber(dying ? NULL : fake, w->stack_bottom, w->stack_bytes);
#endif
    (void)dying;
    simt_switch(from ? &from->sp : &w->sp, to ? to->sp : w->sp);
#if defined(SIMT_ASAN)
    __sanitizer_finish_switch_fiber(*fake, NULL, NULL);
#endif
}

void simt_reschedule(void) {
    worker *w = simt_me;
    if (__builtin_expect(w->launch->failed.load(std::memory_order_relaxed), 0)) simt_leave_fiber();
    if (__builtin_expect(simt_copies == RANDOM_COPIES, 0)
        && (w->group->flight_count || w->group->store_count || w->self->own_count || w->group->products_parked))
        simt_land_at_random(w, w->group);
    fiber *next = choose_fiber(w, w->group);
    if (next != w->self) switch_to(w, next, false);
}

void simt_block_fiber(fiber *f, fiber_state state) {
    f->state = state;
    clear_ready(f->block->group, f->warp, 1u << f->lane);
    simt_reschedule();
}

void simt_leave_fiber(void) {
    simt_me->self->abandoned = 1;
    release(&simt_me->launch->end_tag);
    switch_to(simt_me, NULL, true);
    abort();
}

static void exit_thread(fiber *f);

extern "C" void simt_fiber_main(void) {
#if defined(SIMT_ASAN)
    // The first switch away from the worker's own stack tells its extent.
    if (!simt_me->stack_bottom) __sanitizer_finish_switch_fiber(NULL, &simt_me->stack_bottom, &simt_me->stack_bytes);
    else __sanitizer_finish_switch_fiber(NULL, NULL, NULL);
#endif
    fiber *f = simt_me->self;
    acquire(&simt_me->launch->start_tag);
    f->block->started = 1;
    (*simt_me->launch->body)();
    exit_thread(f);
    fiber *next = choose_fiber(simt_me, simt_me->group);
    switch_to(simt_me, simt_me->launch->failed.load(std::memory_order_relaxed) ? NULL : next, true);
    abort();
}

static void prepare_fiber(fiber *f, unsigned slot) {
    if (!f->stack) {
        size_t guard = sysconf(_SC_PAGESIZE);
        char *p = (char *)mmap(NULL, guard + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                               -1, 0);
        if (p == (char *)MAP_FAILED || mprotect(p, guard, PROT_NONE)) {
            perror("simt: a fiber's stack");
            exit(2);
        }
        f->stack = p + guard;
    }
    if (f->abandoned) show(f->stack, STACK_BYTES);      // redzones of frames that never returned
#if defined(SIMT_TSAN)
    // Each abandonment leaves some frames on libtsan's shadow call stack. A new fiber is slow, so it comes after a thousand.
    if (f->tsan && (f->abandonments += f->abandoned) > 1000) {
        __tsan_destroy_fiber(f->tsan);
        f->tsan = NULL;
        f->abandonments = 0;
    }
    if (!f->tsan) {
        static std::atomic<unsigned> fibers;
        if (++fibers > MOST_TSAN_FIBERS) {
            const simt_launch_shape *s = simt_me->launch->shape;
            fprintf(stderr, "simt: libtsan has no room for this launch: all launches so far have needed %u threads at once, the last "
                    "for clusters of %u blocks of %u threads\n", MOST_TSAN_FIBERS, s->cluster.x * s->cluster.y * s->cluster.z,
                    s->block.x * s->block.y * s->block.z);
            _exit(2);
        }
        f->tsan = __tsan_create_fiber(0);
    }
#endif
    f->abandoned = 0;
    // Stacks whose tops have the same offset in a page share a few cache sets: four times slower.
    f->sp = first_frame(f->stack + STACK_BYTES - slot * 832 % 16384);
}

void simt_yield(const char *file, int line) {
    worker *w = simt_me;
    fiber *f = w->self;
    note_site(f, "a spin loop", file, line);
    f->warp->yielded |= 1u << f->lane;
    w->group->yielded++;
    simt_block_fiber(f, YIELDED);
}

static void wake_yielded(group *g) {
    for (unsigned i = 0; g->yielded && i < g->warp_count; i++) {
        warp *wp = &g->warps[i];
        if (!wp->yielded) continue;
        g->yielded -= __builtin_popcount(wp->yielded);
        set_ready(g, wp, wp->yielded);
        wp->yielded = 0;
    }
}

/* ---- groups ---------------------------------------------------------------------------------------------------------- */

PLAIN_LOOP void simt_fill(void *at, int byte, size_t bytes) {
    char *p = (char *)at;
    for (; bytes && ((uintptr_t)p & 7); bytes--) *p++ = (char)byte;
    uint64_t pattern = 0x0101010101010101u * (unsigned char)byte;
    for (; bytes >= 8; bytes -= 8, p += 8) *(uint64_t *)p = pattern;
    for (; bytes; bytes--) *p++ = (char)byte;
}

/* Shared memory of all blocks of the group, as if it were new, for TSan too. */
static void prepare_memory(launch *l, group *g) {
    size_t stride = round_up(dynamic_area(l) + STATIC_AREA, 1024), bytes = stride * g->block_count;
#if defined(SIMT_TSAN)
    // Under "ignore", free and malloc forget the accesses of earlier blocks instead of checking against them.
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    free(g->memory);
    g->memory = NULL;
#endif
    if (!g->memory || bytes > g->memory_bytes) {
        show(g->memory, g->memory_bytes);
        free(g->memory);
        g->memory = (char *)aligned_alloc(1024, bytes);
        g->memory_bytes = bytes;
    }
#if defined(SIMT_TSAN)
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
    g->memory_stride = stride;
    hide(g->memory, g->memory_bytes);
    g->shared.clear();
    g->shared.reserve(MAX_VARIABLES);               // here: TSan would see a fiber allocate
    g->static_used = g->static_bytes = 0;
    size_t dynamic = l->shape->dynamic_bytes;
    for (unsigned b = 0; b < g->block_count; b++) {
        char *base = g->blocks[b].memory = g->memory + b * stride;
        simt_fill(base, simt_poison_byte(), dynamic);
        simt_fill(base + dynamic, REDZONE_BYTE, dynamic_area(l) - dynamic);
        show(base, dynamic);
    }
}

/* A thread of block `blk` before its start; slot: its number in the group. */
static void start_thread(group *g, block *blk, fiber *f, unsigned slot, uint3 thread, const simt_launch_shape *s) {
    const unsigned i = slot - blk->rank * blk->threads;
    f->here.thread_idx = thread;
    f->here.block_idx = blk->index;
    f->here.block_dim = s->block;
    f->here.grid_dim = s->grid;
    f->block = blk;
    f->warp = &g->warps[blk->rank * ((blk->threads + 31) / 32) + i / 32];
    f->lane = i % 32;
    f->index = i;
    f->state = READY;
    f->cluster_arrivals = f->cluster_waits = f->inits_fenced = f->bulk_groups = f->own_groups = f->own_count = 0;
    f->own_copies = g->own_copies + (size_t)slot * MAX_OWN_COPIES;
    f->waits_for = NULL;
    f->products = f->product_groups = f->products_waited = f->wgmma_fences = f->fences_at_wait = f->held_turn = 0;
    for (held_sums &h : f->held) h.d = NULL;
    prepare_fiber(f, slot);
}

static void start_warp(group *g, block *blk, unsigned i) {
    const unsigned index = blk->rank * ((blk->threads + 31) / 32) + i;
    const unsigned count = blk->threads - i * 32 < 32 ? blk->threads - i * 32 : 32;
    warp *wp = &g->warps[index];
    wp->exist = wp->ready = count == 32 ? ~0u : (1u << count) - 1;
    wp->waiting = wp->yielded = wp->exited = 0;
    wp->index = index;
    wp->lanes = &g->fibers[blk->rank * (size_t)blk->threads + i * 32];
    wp->block = blk;
    for (sync_tag &t : wp->tags) t.mask = 0;
    g->ready_warps[index / 64] |= 1ull << (index % 64);
}

static void start_block(group *g, unsigned rank, unsigned threads, uint3 index) {
    block *blk = &g->blocks[rank];
    blk->group = g;
    blk->rank = rank;
    blk->threads = threads;
    blk->exited = blk->started = blk->arrived = blk->barriers = blk->cluster_waited = 0;
    blk->predicate_count = 0;
    blk->fences = blk->note_count = blk->notes_lost = 0;
    for (named_barrier &n : blk->named) n.arrived = n.generation = 0;
    blk->index = index;
    for (unsigned &m : blk->mapped_after) m = 0;
#if defined(SIMT_TSAN)
    // Here, by the worker: a new fiber is ordered after all that its creator has seen.
    for (auto &kind : blk->copiers)
        for (void *&t : kind)
            if (!t) t = __tsan_create_fiber(0);
#endif
}

/* Sets up the group number `ordinal` in the order of the launch. */
static void start_group(worker *w, group *g, unsigned long long ordinal) {
    launch *l = w->launch;
    const simt_launch_shape *s = l->shape;
    const unsigned long long number =
        simt_schedule == FORWARD ? ordinal : simt_schedule == REVERSE ? l->groups - 1 - ordinal : l->shuffled[ordinal];
    const dim3 c = s->cluster, size = s->block, clusters(s->grid.x / c.x, s->grid.y / c.y, s->grid.z / c.z);
    const unsigned threads = size.x * size.y * size.z, warps = (threads + 31) / 32;
    const uint3 first = make_uint3(number % clusters.x * c.x, number / clusters.x % clusters.y * c.y,
                                   number / clusters.x / clusters.y * c.z);
    w->random = (l->seed + number) * 0x9e3779b97f4a7c15u;
    g->ordinal = ordinal;
    g->block_count = c.x * c.y * c.z;
    g->warp_count = g->block_count * warps;
    g->live = g->block_count * threads;
    g->current_warp = simt_schedule == REVERSE ? g->warp_count - 1 : 0;
    g->yielded = g->cluster_arrived = g->cluster_phase = g->cluster_left = 0;
    if (g->fibers.size() < g->live) g->fibers.resize(g->live);
    if (g->warps.size() < g->warp_count) g->warps.resize(g->warp_count);
    if (g->blocks.size() < g->block_count) g->blocks.resize(g->block_count);
    w->copy_random = (copies_seed * 1000003 + l->seed + number) * 0x9e3779b97f4a7c15u + 1;
    prepare_memory(l, g);
    simt_prepare_copies(g, threads);
    simt_prepare_products(g);
    for (uint64_t &word : g->ready_warps) word = 0;
    for (unsigned b = 0; b < g->block_count; b++) {
        start_block(g, b, threads, make_uint3(first.x + b % c.x, first.y + b / c.x % c.y, first.z + b / c.x / c.y));
        for (unsigned i = 0; i < warps; i++) start_warp(g, &g->blocks[b], i);
        uint3 t = make_uint3(0, 0, 0);
        for (unsigned i = 0; i < threads; i++) {
            const unsigned slot = b * threads + i;
            start_thread(g, &g->blocks[b], &g->fibers[slot], slot, t, s);
            if (++t.x == size.x) {
                t.x = 0;
                if (++t.y == size.y) t.y = 0, t.z++;
            }
        }
    }
    release(&l->start_tag);
}

static void check_redzone(const block *blk, size_t from, size_t to, const char *what, const char *file, int line) {
    const unsigned char *p = (const unsigned char *)blk->memory;
    for (size_t i = from; i < to; i++) {
        if (p[i] == REDZONE_BYTE) continue;
        simt_fail_all(file, line, "shared memory was written %zu bytes past the end of %s", i - from, what);
        return;
    }
}

static void retire_group(worker *w, group *g) {
    size_t dynamic = w->launch->shape->dynamic_bytes;
    for (unsigned b = 0; b < g->block_count; b++) {
        block *blk = &g->blocks[b];
        check_redzone(blk, dynamic, dynamic_area(w->launch), "the dynamic shared memory", "launch", 0);
        for (const shared_slot &s : g->shared) {
            size_t end = s.offset + s.variable->bytes;
            check_redzone(blk, end, round_up(end, 16) + REDZONE, s.variable->name, s.variable->file, s.variable->line);
        }
    }
}

/* ---- the end of a thread --------------------------------------------------------------------------------------------- */

static void exit_block(block *blk) {
    group *g = blk->group;
    simt_check_copies_of_block(blk);
    for (unsigned p = 0; p < g->block_count; p++) {
        // Block p asked for our memory after `mapped_after - 1` barriers. Its access is over once we have waited for the next.
        if (p != blk->rank && blk->mapped_after[p] && blk->cluster_waited < blk->mapped_after[p])
            simt_fail_all("cluster", 0,
                          "a peer block gone: block rank %u exits, and no cluster barrier that it waited for orders the "
                          "accesses of rank %u to its shared memory before that", blk->rank, p);
    }
    if (g->block_count > 1) {
        size_t dynamic = simt_me->launch->shape->dynamic_bytes;
        simt_fill(blk->memory, simt_poison_byte(), dynamic);
        hide(blk->memory, dynamic);
        for (const shared_slot &s : g->shared) {
            simt_fill(blk->memory + s.offset, simt_poison_byte(), s.variable->bytes);
            hide(blk->memory + s.offset, s.variable->bytes);
        }
    }
}

static void exit_thread(fiber *f) {
    block *blk = f->block;
    group *g = blk->group;
    warp *wp = f->warp;
    unsigned bit = 1u << f->lane;
    if (blk->arrived)
        simt_fail_all(blk->barrier_site.file, blk->barrier_site.line,
                      "thread %u exited while %u threads of its block wait in __syncthreads", f->index, blk->arrived);
    for (unsigned m = wp->waiting; m; m &= m - 1) {
        unsigned lane = __builtin_ctz(m);
        if (wp->mask[lane] & bit)
            simt_fail_all(wp->site[lane].file, wp->site[lane].line,
                          "lane %u exited while lane %u waits for it in %s, mask 0x%08x", f->lane, lane, wp->site[lane].what,
                          wp->mask[lane]);
    }
    if (g->cluster_arrived && f->cluster_arrivals == g->cluster_phase)
        simt_fail_all(g->cluster_site.file, g->cluster_site.line,
                      "thread %u of cluster rank %u exited while others arrived at a cluster barrier", f->index, blk->rank);
    if (g->store_count || f->own_count) simt_check_copies_of_thread(f);
    if (f->products != f->products_waited) simt_check_products_of_thread(f);
    if (f->cluster_arrivals == g->cluster_phase + 1) g->cluster_left++;
    release(&simt_me->launch->end_tag);
    f->state = EXITED;
    wp->exited |= bit;
    clear_ready(g, wp, bit);
    g->live--;
    simt_me->progress++;
    if (++blk->exited == blk->threads) exit_block(blk);
}

/* ---- workers --------------------------------------------------------------------------------------------------------- */

static bool any_ready(const group *g) {
    for (unsigned i = 0; i < (g->warp_count + 63) / 64; i++)
        if (g->ready_warps[i]) return true;
    return false;
}

/* Runs a group until none of its threads is ready. */
static void run_group(worker *w, group *g) {
    w->group = g;
    fiber *first = choose_fiber(w, g);
    if (first) switch_to(w, first, false);
}

static group *take_next_group(worker *w) {
    launch *l = w->launch;
    unsigned long long ordinal = l->next.fetch_add(1);
    if (ordinal >= l->groups) {
        l->next = l->groups;
        return NULL;
    }
    if (w->idle.empty()) w->idle.push_back(new group());
    group *g = w->idle.back();
    w->idle.pop_back();
    w->resident.push_back(g);
    start_group(w, g, ordinal);
    return g;
}

/* Since this progress was reached, every worker has made a whole round without any. So each has polled what all the others have
   written, and none will ever get further. */
static bool all_stuck(const launch *l, uint64_t progress) {
    if (l->progress.load() != progress) return false;
    for (unsigned i = 0; i < l->workers; i++) {
        uint64_t at = l->stuck_at[i].load();
        if (at != progress && at != FINISHED) return false;
    }
    return true;
}

/* Runs every resident group until it has nothing ready; retires those that end. */
static void run_round(worker *w) {
    launch *l = w->launch;
    for (size_t i = 0; i < w->resident.size();) {
        group *g = w->resident[i];
        wake_yielded(g);
        run_group(w, g);
        while (!l->failed) {                            // copies first: wgmma are done as late as possible
            const bool other = simt_copies == RANDOM_COPIES && g->products_parked && random_number(&w->copy_random) & 1;
            if (g->flight_count && !(other && simt_finish_products(w, g))) simt_land_one(w, g);
            else if (!g->flight_count && !(g->products_parked && simt_finish_products(w, g))) break;
            if (!l->failed && any_ready(g)) run_group(w, g);
        }
        if (l->failed) return;
        if (!g->live) {
            retire_group(w, g);
            w->resident.erase(w->resident.begin() + i);
            w->idle.push_back(g);
            continue;
        }
        if (!any_ready(g) && !g->yielded) simt_report_deadlock(g);
        i++;
    }
}

static void abandon(worker *w, group *g) {
    for (fiber &f : g->fibers) {
        f.abandoned = 1;
#if defined(SIMT_TSAN)
        if (!f.tsan) continue;
        __tsan_switch_to_fiber(f.tsan, 1);              // as that fiber: what it did is ordered before what follows the launch
        release(&w->launch->end_tag);
        __tsan_switch_to_fiber(w->tsan, 1);
#endif
    }
    show(g->memory, g->memory_bytes);
    w->idle.push_back(g);
}

/* One group at a time, from start to end. Others start only while all that are there spin: they may wait for blocks that have
   not started. */
static void work(worker *w) {
    launch *l = w->launch;
    unsigned rounds = 0;                                // in a row without progress of any worker
    uint64_t seen = 0;
    const unsigned patience = 64, give_up = 20000;
    const simt_launch_shape *s = l->shape;
    const dim3 b = s->block, c = s->cluster;
    const size_t room = MAX_RESIDENT_THREADS / ((size_t)b.x * b.y * b.z * c.x * c.y * c.z);
    while (!l->failed.load(std::memory_order_relaxed)) {
        uint64_t now = l->progress.load();
        rounds = now == seen ? rounds + 1 : 0;
        seen = now;
        if (w->resident.empty() || (rounds >= patience && w->resident.size() < room)) {
            l->stuck_at[w->index] = NOT_STUCK;          // before it is taken: a group that has not run is no deadlock
            if (take_next_group(w)) w->progress++;
            else if (w->resident.empty()) break;
        }
        run_round(w);
        if (w->progress) {
            l->progress.fetch_add(w->progress);
            w->progress = 0;
            continue;
        }
        l->stuck_at[w->index] = now;
        if (rounds <= give_up || l->failed) continue;
        if (all_stuck(l, now)) simt_fail_all("spin loops", 0, "deadlock: all threads that can run only spin");
        sched_yield();                                  // a worker on another OS thread still has work
    }
    l->stuck_at[w->index] = FINISHED;
    for (group *g : w->resident) abandon(w, g);
    w->resident.clear();
    w->progress = 0;
}

/* A host thread that ends leaves its worker to the next one: fibers take long to make, and TSan has few. */
static simt_mutex &spare_mutex = *new simt_mutex();
static worker *spare_workers;
struct worker_return {
    ~worker_return() {
        std::lock_guard<simt_mutex> lock(spare_mutex);
        release(simt_me);
        simt_me->next_spare = spare_workers;
        spare_workers = simt_me;
        simt_me = NULL;
    }
};

static worker *this_worker(void) {
    if (!simt_me) {
        static thread_local worker_return at_exit;
        (void)&at_exit;
        std::lock_guard<simt_mutex> lock(spare_mutex);
        simt_me = spare_workers ? spare_workers : new worker();
        spare_workers = simt_me->next_spare;
        acquire(simt_me);
        simt_me->stack_bottom = NULL;
#if defined(SIMT_TSAN)
        simt_me->tsan = __tsan_get_current_fiber();
#endif
    }
    return simt_me;
}

static void work_on(launch *l, unsigned index) {
    worker *w = this_worker();
    w->launch = l;
    w->index = index;
    work(w);
    w->launch = NULL;
    w->group = NULL;
}

/* Helpers wait for the next launch until the process ends. They are never destroyed: exit would wait for them. */
static struct helper_pool {
    std::mutex mutex;
    std::condition_variable wake, done;
    launch *job;
    unsigned wanted, busy, threads;
} &helpers = *new helper_pool();

static void helper_main(void) {
    std::unique_lock<std::mutex> lock(helpers.mutex);
    for (;;) {
        helpers.wake.wait(lock, [] { return helpers.wanted > 0; });
        unsigned index = helpers.wanted--;
        launch *l = helpers.job;
        lock.unlock();
        work_on(l, index);
        lock.lock();
        if (!--helpers.busy) helpers.done.notify_one();
    }
}

static unsigned worker_count(void) {
    static unsigned count;
    if (count) return count;
#if defined(SIMT_TSAN)
    count = 1;                                          // TSan would see races between OS threads in the engine itself
#else
    const char *text = getenv("SIMT_THREADS");
    cpu_set_t set;
    int n = text ? atoi(text) : sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    count = n < 1 ? 1 : n > MAX_WORKERS ? MAX_WORKERS : n;
#endif
    return count;
}

#if defined(SIMT_TSAN)
void simt_mutex::lock(void) {
    static __thread char self;
    const void *nobody = NULL;
    while (owner.load() != &self && !owner.compare_exchange_weak(nobody, &self)) {
        usleep(20);
        nobody = NULL;
    }
    depth++;
}
void simt_mutex::unlock(void) {
    if (!--depth) owner.store(NULL);
}
#endif

static simt_mutex &one_launch = *new simt_mutex();

/* A forked child has none of the helpers: it begins with a pool of its own. No thread forks during another one's launch. The
 * child cannot unlock what its parent's thread locked. */
[[maybe_unused]] static const int at_fork = pthread_atfork([] { one_launch.lock(); }, [] { one_launch.unlock(); },
                                                           [] { new (&helpers) helper_pool(); new (&one_launch) simt_mutex(); });

int simt_run(const simt_launch_shape *shape, const std::function<void()> &body) {
    std::lock_guard<simt_mutex> lock(one_launch);
    if (!schedule_known) simt_set_schedule(NULL);
    choose_copies();
    launch l;
    l.shape = shape;
    l.body = &body;
    unsigned long long blocks = (unsigned long long)shape->grid.x * shape->grid.y * shape->grid.z;
    l.groups = blocks / (shape->cluster.x * shape->cluster.y * shape->cluster.z);
    l.seed = schedule_seed * 1000003 + launch_count++;
    if (simt_schedule == RANDOM) {
        uint64_t state = l.seed;
        for (unsigned long long i = 0; i < l.groups; i++) l.shuffled.push_back(i);
        for (unsigned long long i = l.groups; i > 1; i--) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            std::swap(l.shuffled[i - 1], l.shuffled[(state >> 33) % i]);
        }
    }
    unsigned count = (unsigned)std::min<unsigned long long>(worker_count(), l.groups);
    l.workers = count;
    for (unsigned i = 0; i < count; i++) l.stuck_at[i] = NOT_STUCK;
    if (count > 1) {
        std::lock_guard<std::mutex> guard(helpers.mutex);
        for (; helpers.threads < count - 1; helpers.threads++) std::thread(helper_main).detach();
        helpers.job = &l;
        helpers.wanted = helpers.busy = count - 1;
        helpers.wake.notify_all();
    }
    work_on(&l, 0);
    if (count > 1) {
        std::unique_lock<std::mutex> guard(helpers.mutex);
        helpers.done.wait(guard, [] { return !helpers.busy; });
    }
    acquire(&l.end_tag);
    return l.failed ? -1 : 0;
}

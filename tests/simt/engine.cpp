// SPDX-License-Identifier: MIT
/*
The engine of the simulator: fibers, schedules, collectives, clusters, shared memory, mbarriers, copies, reports. simt.h is
the manual.

A launch is a grid of *groups*: a group is a cluster, or a single block where there are no clusters. An OS thread (a *worker*) takes the next
group of the grid, gives each of its CUDA threads a fiber, and switches to the first. A fiber that has to wait leaves its warp's ready mask and switches
straight to the next ready fiber of the group; only when the group has none does it switch back to the worker's own stack (run_round), which
lands asynchronous copies, retires the group, wakes those that yielded, starts another group beside one that only spins, or
reports a deadlock. Lazy copies land nowhere else, but cp.async and bulk stores in their thread's wait; eager ones land
where they are issued, random ones in reschedule() too. So are wgmma done, behind the copies.

This file is compiled without sanitizers, so what it does to the kernel's memory is not checked; it avoids memcpy and memset inside a launch
because libtsan would record them as the running fiber's accesses.
*/
#include "cuda_runtime.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

// On loops over the kernel's memory, or they become calls of memcpy and memset.
#if defined(__clang__)
#define PLAIN_LOOP __attribute__((noinline, no_builtin))
#else
#define PLAIN_LOOP __attribute__((noinline, optimize("no-tree-loop-distribute-patterns")))
#endif

/* ---- the sanitizers' fiber interfaces ------------------------------------------------------------------------------------------------- */

#if defined(SIMT_ASAN)
extern "C" void __sanitizer_start_switch_fiber(void **fake_stack, const void *bottom, size_t bytes);
extern "C" void __sanitizer_finish_switch_fiber(void *fake_stack, const void **old_bottom, size_t *old_bytes);
extern "C" void __asan_poison_memory_region(const volatile void *at, size_t bytes);
extern "C" void __asan_unpoison_memory_region(const volatile void *at, size_t bytes);
static void hide(void *at, size_t bytes) { __asan_poison_memory_region(at, bytes); }
static void show(void *at, size_t bytes) { __asan_unpoison_memory_region(at, bytes); }
extern "C" void *__asan_region_is_poisoned(void *at, size_t bytes);
static const void *first_hidden(const void *at, size_t bytes) { return __asan_region_is_poisoned((void *)at, bytes); }
#else
static void hide(void *, size_t) {}
static void show(void *, size_t) {}
static const void *first_hidden(const void *, size_t) { return NULL; }
#endif

#if defined(SIMT_TSAN)
extern "C" void *__tsan_get_current_fiber(void);
extern "C" void *__tsan_create_fiber(unsigned flags);
extern "C" void __tsan_destroy_fiber(void *fiber);
extern "C" void __tsan_switch_to_fiber(void *fiber, unsigned flags);
extern "C" void __tsan_acquire(void *at);
extern "C" void __tsan_release(void *at);
extern "C" void AnnotateIgnoreReadsBegin(const char *file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char *file, int line);
extern "C" void AnnotateIgnoreWritesBegin(const char *file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char *file, int line);
static void acquire(void *at) { __tsan_acquire(at); }
static void release(void *at) { __tsan_release(at); }
extern "C" void __tsan_read_range(void *at, unsigned long bytes);
extern "C" void __tsan_write_range(void *at, unsigned long bytes);
extern "C" void __tsan_func_entry(void *pc);
extern "C" void __tsan_func_exit(void);
/* An access of the running fiber, seen at `pc` in the kernel. */
static void touch(const void *at, size_t bytes, bool write, void *pc) {
    __tsan_func_entry(pc);
    write ? __tsan_write_range((void *)at, bytes) : __tsan_read_range((void *)at, bytes);
    __tsan_func_exit();
}
enum { MAX_RESIDENT_THREADS = 4096 };       // libtsan stops near 8000 fibers
#else
static void acquire(void *) {}
static void release(void *) {}
static void touch(const void *, size_t, bool, void *) {}
enum { MAX_RESIDENT_THREADS = 16384 };      // two mappings each, below vm.max_map_count
#endif

/* ---- data ------------------------------------------------------------------------------------------------------------------------------- */

enum {
    MAX_BLOCKS = 16,                    // of a cluster
    MAX_WARPS = MAX_BLOCKS * 32,
    STACK_BYTES = 256 << 10,            // address space; only what is touched costs memory
    STATIC_BYTES = 48 << 10,            // CUDA's limit for static shared memory
    REDZONE = 32,                       // after each shared variable
    MAX_VARIABLES = 256,
    STATIC_AREA = STATIC_BYTES + MAX_VARIABLES * (REDZONE + 16),
    REDZONE_BYTE = 0xCB,
    MAX_TAGS = 8,
    MAX_WORKERS = 64,
    MAX_BARRIERS = 64,                  // mbarriers of a block
    MAX_ARRIVALS = (1 << 20) - 1,       // of an mbarrier's phase, and its bytes to either side of 0
    MAX_COPIES = 4096,                  // in flight in a group; beyond that the oldest lands. A power of two
    MAX_STORES = 1024,                  // bulk stores of a group that are not waited for
    MAX_OWN_COPIES = 128,               // cp.async of a thread that are not waited for
    MAX_NOTES = 64,                     // ranges of a block's shared memory that copies have left or read
    COPIERS = 4,                        // TSan fibers in turn for one kind of access
    WARPGROUP = 128,                    // threads
    MAX_PRODUCTS = 64,                  // wgmma of a warpgroup that are not done. A power of two
    MAX_SUMS = 8,                       // arrays of sums that they are on their way to
    MAX_ATOMS = 40,                     // of 1024 bytes, that a wgmma reads
    MAX_CHUNKS = 2 * (64 + 256),        // of 16 bytes
    MAX_COMMITS = 8,                    // groups of wgmma whose ends a thread remembers
    MAX_HELD = 4,                       // arrays of sums that a thread remembers to have got
    NAMED_BARRIERS = 16,
};

static const uint64_t FINISHED = ~0ull, NOT_STUCK = ~0ull - 1;

struct group;
struct block;
struct warp;
struct worker;

struct wait_site {
    const char *what, *file;
    int line;
};

enum fiber_state { READY, IN_WARP, IN_BLOCK, IN_CLUSTER, IN_MBARRIER, IN_NAMED, IN_WGMMA, YIELDED, EXITED };

/* What an mbarrier is. The kernel's 64 bits hold only a magic number and this one's index, which an ordinary store to them
   destroys. */
struct mbarrier {
    uint64_t *at;
    struct block *block;
    unsigned count, pending, phase;     // phase: how many have ended
    int bytes;                          // announced less landed in this phase
    size_t in_flight;                   // bytes of copies that are issued and have not landed
    unsigned parked, waking;            // threads that wait for this phase; that waited for the last and have not run since
    unsigned initialiser, fenced;       // the thread, and whether it has published the init
    // the last phase that bytes landed in, and the last that somebody waited for; -1 at first
    int counts_bytes, landed_in, waited_for;
    int from_peers[2];                  // per parity: a peer arrived or stored in this phase
    wait_site born, passed;             // passed: who has waited for parity 1 before the first phase
    char tag[2];
};

struct tensor_box {                     // what a tensor copy moves; element: bytes of one, 0: not a tensor copy
    char *base;
    int64_t size[2], stride;
    int at[2];
    unsigned box[2], element, span;
};

struct flight {                         // a bulk load, tensor load or st.async on its way
    char *to;
    const char *from;                   // NULL: the 8 bytes of `value`
    uint64_t value;
    unsigned bytes, peer;               // peer: issued by another block than the one it goes to
    mbarrier *bar;
    wait_site site;
    tensor_box box;
};

struct store {                          // a bulk or tensor store, from its issue until it is waited for
    char *to;
    const char *from;
    unsigned bytes, group, landed;      // group: the bulk group of its thread
    uint64_t hash;                      // of the source when it was issued
    struct fiber *by;
    wait_site site;
    tensor_box box;
    int add;
};

struct own_copy {                       // a cp.async, from its issue until its thread waits for it
    char *to;
    const char *from, *file;
    int line;
    unsigned group;                     // of its thread
    unsigned short bytes, landed;
};

struct range_note {                     // shared memory as a copy left or read it
    const char *from, *to;
    uint64_t hash;
    unsigned fences;                    // that the block had executed by then
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

struct sums {                           // registers that wgmma are on their way to
    int n;
    unsigned holders, last[WARPGROUP];  // per thread: 1 + the number of its last wgmma there
    float *d[WARPGROUP];                // per thread: its registers, NULL while it may touch them
    float tile[64 * 256];               // what will be in them, a row of n after the other
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
    char issue_tag[MAX_PRODUCTS][4], done_tag[MAX_PRODUCTS];    // issue: one a warp
    struct fiber *threads;
    float left[64 * 16], right[16 * 256];   // operands of the one being multiplied
    product products[MAX_PRODUCTS];     // by number
    sums all_sums[MAX_SUMS];
};

struct held_sums {                      // sums as a thread has got them
    const float *d;
    uint64_t hash;
    unsigned fences;                    // that it had executed by then
};

struct named_barrier {
    unsigned threads, arrived, generation;
    wait_site site;                     // of the first that arrived
    char tag[2];
};

struct fiber {
    simt_coordinates here;              // first: simt_here points at it
    void *sp;                           // saved stack pointer while not running
    struct block *block;
    struct warp *warp;
    unsigned lane, index;               // index: of the thread in its block
    fiber_state state;
    unsigned cluster_arrivals, cluster_waits, inits_fenced; // inits_fenced: lk_fence_mbarrier_init since the last arrival
    mbarrier *waits_for;                // while IN_MBARRIER
    unsigned waits_phase;
    unsigned bulk_groups, own_groups;   // committed so far; own: of cp.async
    unsigned own_count;
    own_copy *own_copies;
    // wgmma: issued, groups committed, the wgmma issued by then, done as far as the thread has waited
    unsigned products, product_groups, product_commits[MAX_COMMITS], products_waited;
    unsigned products_needed;           // while IN_WGMMA
    unsigned wgmma_fences, fences_at_wait, held_turn;
    held_sums held[MAX_HELD];
    int named;                          // while IN_NAMED
    char issue_tag, read_tag[4], write_tag[4];  // of its copies; the last two by bulk group
    char *stack;
    void *fake_stack, *tsan;
    int abandoned, abandonments;        // the last launch left it in the middle of a kernel; how many did
};

struct sync_tag {                       // what TSan orders __syncwarp by: one pair for each mask in use
    unsigned mask, generation;
    char at[2];
};

struct warp {
    unsigned exist, ready, waiting, yielded, exited;    // one bit a lane; waiting: in a warp operation
    unsigned index;                                     // in the group
    fiber *lanes;
    struct block *block;
    // what each waiting lane asked for
    uint64_t value[32];
    unsigned mask[32], argument[32];
    simt_warp_operation operation[32];
    void *gather_to[32];
    size_t gather_bytes[32];
    wait_site site[32];                 // where the lane waits, in a warp operation or elsewhere
    sync_tag tags[MAX_TAGS];
};

struct block {
    struct group *group;
    unsigned rank, threads, exited, started;
    uint3 index;
    unsigned arrived, barriers;         // at the current block barrier; barriers complete so far
    int predicate_count, result;
    wait_site barrier_site;             // of the first that arrived
    char *memory;                       // dynamic area, then static area
    unsigned cluster_waited;            // cluster barriers that some thread of this block has waited for
    unsigned mapped_after[MAX_BLOCKS];  // per peer: 1 + cluster barriers its threads had arrived at when they last asked for our memory
    unsigned fences, note_count, notes_lost;    // fences: lk_fence_proxy_async_shared
    range_note notes[MAX_NOTES];
    named_barrier named[NAMED_BARRIERS];
    char tag[2], fence_tag;
    void *copiers[4][COPIERS];          // TSan's: by copier
    unsigned copier_turn;
};

struct shared_slot {
    const simt_variable *variable;
    size_t offset;
};

struct group {
    uint64_t ready_warps[MAX_WARPS / 64];
    unsigned block_count, warp_count, live, yielded;
    unsigned current_warp;
    unsigned cluster_arrived, cluster_phase, cluster_left;  // left: arrived in this phase and exited without waiting
    wait_site cluster_site;
    unsigned long long ordinal;         // position in the order of the grid
    std::vector<fiber> fibers;
    std::vector<warp> warps;
    std::vector<block> blocks;
    char *memory;
    size_t memory_stride, memory_bytes;
    std::vector<shared_slot> shared;
    size_t static_used, static_bytes;
    char cluster_tag[2];
    unsigned barrier_count, first_flight, flight_count, store_count;
    mbarrier *barriers;
    // per barrier and thread of the block: the phase; -1: the one before the first, -2: none
    int *last_waited;
    size_t last_waited_room;
    flight *flights;                    // a ring
    store *stores;
    own_copy *own_copies;               // MAX_OWN_COPIES for each thread
    size_t own_copies_room;
    // eight for each block, those that were ever used; products_parked: threads that wait for wgmma
    warpgroup *warpgroups[MAX_BLOCKS * 1024 / WARPGROUP];
    unsigned products_parked;
};

struct launch {
    const simt_launch_shape *shape;
    const std::function<void()> *body;
    unsigned long long groups;
    std::vector<unsigned long long> shuffled;
    std::atomic<unsigned long long> next{0};
    std::atomic<int> failed{0};
    unsigned workers;
    std::atomic<uint64_t> progress{0};  // grows with everything that any worker gets done
    std::atomic<uint64_t> stuck_at[MAX_WORKERS];    // per worker: the progress that its last fruitless round began with
    uint64_t seed;
    char start_tag, end_tag;
};

struct worker {                         // one an OS thread
    struct launch *launch;
    worker *next_spare;
    unsigned index;
    struct group *group;
    fiber *self;                        // the running fiber, NULL on the worker's own stack
    void *sp;                           // of that stack
    uint64_t random, copy_random, progress;
    std::vector<struct group *> resident, idle;
    const void *stack_bottom;
    size_t stack_bytes;
    void *fake_stack, *tsan;
    // for messages; not thread-local, since little of that is left for a library that a program loads when it runs
    char barrier_text[512], place_names[4][128];
    unsigned places;
};

enum order { FORWARD, REVERSE, RANDOM };

static order schedule;
static uint64_t schedule_seed;
static int schedule_known;
static uint64_t launch_count;

enum copy_order { LAZY, EAGER, RANDOM_COPIES };

static copy_order copies;               // of this launch
static uint64_t copies_seed;
static char copies_asked[64];
static int copies_known;

__thread const simt_coordinates *simt_here __attribute__((tls_model("initial-exec")));
static __thread worker *me __attribute__((tls_model("initial-exec")));

/* ---- reports ------------------------------------------------------------------------------------------------------------------------------ */

static std::mutex report_mutex;
static std::string last_report;
static int quiet;

const char *simt_last_report(void) { return last_report.c_str(); }
void simt_clear_report(void) { last_report.clear(); }
void simt_quiet(int value) { quiet = value; }

void simt_report_text(const char *text) {
    std::lock_guard<std::mutex> lock(report_mutex);
    last_report = text;
    if (!quiet) fputs(text, stderr);
}

static void append(std::string &text, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void append(std::string &text, const char *format, ...) {
    char line[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    text += line;
}

std::string simt_symbol_name(const void *address);     // runtime.cpp

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static const char *place_name(const group *g, const void *at);

/* These texts go into messages of fibers that are then abandoned with all that is on their stacks: so no std::string. */
static const char *barrier_text(const group *g, const mbarrier *bar) {
    char *const text = me->barrier_text;
    snprintf(text, sizeof me->barrier_text, "mbarrier %s, initialised at %s:%d, in phase %u: %u of %u arrivals missing, %d bytes %s",
             place_name(g, bar->at),
             base_name(bar->born.file), bar->born.line, bar->phase, bar->pending, bar->count, abs(bar->bytes),
             bar->bytes < 0 ? "too many" : "missing");
    return text;
}

static void describe_fiber(std::string &text, const fiber *f, unsigned first, unsigned last) {
    uint3 b = f->block->index;
    const wait_site *site = &f->warp->site[f->lane];
    append(text, "simt:   block (%u,%u,%u) thread%s %u", b.x, b.y, b.z, first == last ? "" : "s", first);
    if (last != first) append(text, "-%u", last);
    if (f->state == EXITED) append(text, " exited\n");
    else if (f->state == READY) append(text, " can run\n");
    else if (f->state == IN_WARP)
        append(text, " in %s, mask 0x%08x, %s:%d\n", site->what, f->warp->mask[f->lane], base_name(site->file), site->line);
    else if (f->state == IN_MBARRIER)
        append(text, " in %s for %s, phase %u, %s:%d\n", site->what, place_name(f->block->group, f->waits_for->at),
               f->waits_phase,
               base_name(site->file), site->line);
    else if (f->state == IN_NAMED)
        append(text, " in %s, number %d, %u of %u threads there, %s:%d\n", site->what, f->named,
               f->block->named[f->named].arrived, f->block->named[f->named].threads, base_name(site->file), site->line);
    else append(text, " in %s, %s:%d\n", site->what, base_name(site->file), site->line);
}

/* Where everybody of the group stands, runs of threads that wait for the same thing on one line. */
static void describe_group(std::string &text, const group *g) {
    unsigned lines = 0;
    for (unsigned i = 0; i < g->barrier_count; i++) {
        const mbarrier *bar = &g->barriers[i];
        if (!g->yielded && !bar->parked && !bar->bytes && bar->pending == bar->count) continue;
        if (++lines > 16) break;
        uint3 b = bar->block->index;
        append(text, "simt:   block (%u,%u,%u) %s\n", b.x, b.y, b.z, barrier_text(g, bar));
    }
    for (unsigned b = 0; b < g->block_count; b++) {
        const block *blk = &g->blocks[b];
        const fiber *all = &g->fibers[b * (size_t)blk->threads];
        unsigned first = 0;
        for (unsigned i = 1; i <= blk->threads; i++) {
            if (i < blk->threads && all[i].state == all[first].state) {
                const wait_site *s = &all[i].warp->site[all[i].lane], *t = &all[first].warp->site[all[first].lane];
                bool same_mask = all[i].state != IN_WARP || all[i].warp->mask[all[i].lane] == all[first].warp->mask[all[first].lane];
                same_mask = same_mask && (all[i].state != IN_MBARRIER || all[i].waits_for == all[first].waits_for);
                same_mask = same_mask && (all[i].state != IN_NAMED || all[i].named == all[first].named);
                if (all[i].state == EXITED || all[i].state == READY || (s->line == t->line && s->what == t->what && same_mask)) continue;
            }
            if (++lines > 48) {
                append(text, "simt:   ...\n");
                return;
            }
            describe_fiber(text, &all[first], first, i - 1);
            first = i;
        }
    }
}

static void file_report(launch *l, const std::string &text) {
    if (l->failed.exchange(1)) return;              // the first error of a launch is the one that is told
    simt_report_text(text.c_str());
}

static void leave_fiber(void) __attribute__((noreturn));

static void report_failure(worker *w, bool everybody, const char *file, int line, const char *message) {
    std::string text;
    append(text, "simt: %s:%d: ", base_name(file), line);
    text += message;
    text += "\n";
    if (!w || !w->launch) {
        simt_report_text(text.c_str());
        return;
    }
    append(text, "simt:   kernel %s", simt_symbol_name(w->launch->shape->kernel).c_str());
    if (w->self) {
        uint3 b = w->self->here.block_idx, t = w->self->here.thread_idx;
        append(text, ", block (%u,%u,%u), thread (%u,%u,%u)", b.x, b.y, b.z, t.x, t.y, t.z);
    }
    text += "\n";
    if (everybody) describe_group(text, w->group);
    file_report(w->launch, text);
}

static void fail_with(bool everybody, const char *file, int line, const char *message) {
    report_failure(me, everybody, file, line, message);     // its strings are gone before this stack is abandoned
    if (me && me->self) leave_fiber();
}

void simt_fail(const char *file, int line, const char *format, ...) {
    char message[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
    fail_with(false, file, line, message);
}

static void fail_all(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void fail_all(const char *file, int line, const char *format, ...) {
    char message[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
    fail_with(true, file, line, message);
}

/* ---- schedules ---------------------------------------------------------------------------------------------------------------------------- */

void simt_set_schedule(const char *text) {
    if (!text) text = getenv("SIMT_SCHEDULE");
    if (!text || !*text) text = "forward";
    schedule_known = 1;
    if (!strcmp(text, "forward")) schedule = FORWARD;
    else if (!strcmp(text, "reverse")) schedule = REVERSE;
    else if (!strncmp(text, "random", 6) && (!text[6] || text[6] == ':')) {
        schedule = RANDOM;
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

/* The order of this launch's copies: the one asked for, else the one that goes with the schedule. */
static void choose_copies(void) {
    if (!copies_known) simt_set_copies(NULL);
    copies_seed = schedule_seed;
    if (!*copies_asked) copies = schedule == FORWARD ? LAZY : schedule == REVERSE ? EAGER : RANDOM_COPIES;
    else if (*copies_asked == 'l') copies = LAZY;
    else if (*copies_asked == 'e') copies = EAGER;
    else copies = RANDOM_COPIES, copies_seed = copies_asked[6] ? strtoull(copies_asked + 7, NULL, 0) : 1;
}

static uint64_t next_of(uint64_t *state) {              // splitmix64
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
static uint64_t next_random(worker *w) { return next_of(&w->random); }

/* Index of a set bit: the lowest, the highest, or the first one at or after a random place. */
static unsigned choose_bit(worker *w, uint64_t bits, unsigned width) {
    if (schedule == FORWARD) return __builtin_ctzll(bits);
    if (schedule == REVERSE) return 63 - __builtin_clzll(bits);
    unsigned from = next_random(w) % width;
    uint64_t upper = bits & (~0ull << from);
    return __builtin_ctzll(upper ? upper : bits);
}

static fiber *choose_fiber(worker *w, group *g) {
    warp *wp = &g->warps[g->current_warp];
    // Stay with a warp while it can run: its 32 stacks are warm. A random schedule leaves it now and then.
    if (!wp->ready || (schedule == RANDOM && !(next_random(w) & 3))) {
        unsigned words = (g->warp_count + 63) / 64, found = words;
        if (schedule == FORWARD) {
            for (found = 0; found < words && !g->ready_warps[found]; found++);
        } else if (schedule == REVERSE) {
            for (unsigned i = words; i-- > 0 && found == words;) if (g->ready_warps[i]) found = i;
        } else {
            unsigned from = next_random(w) % words;
            for (unsigned i = 0; i < words && found == words; i++) if (g->ready_warps[(from + i) % words]) found = (from + i) % words;
        }
        if (found == words) return NULL;
        g->current_warp = found * 64 + choose_bit(w, g->ready_warps[found], 64);
        wp = &g->warps[g->current_warp];
    }
    return &wp->lanes[choose_bit(w, wp->ready, 32)];
}

static void set_ready(group *g, warp *wp, unsigned lanes) {
    wp->ready |= lanes;
    g->ready_warps[wp->index / 64] |= 1ull << (wp->index % 64);
    for (unsigned m = lanes; m; m &= m - 1) wp->lanes[__builtin_ctz(m)].state = READY;
}

static void clear_ready(group *g, warp *wp, unsigned lanes) {
    wp->ready &= ~lanes;
    if (!wp->ready) g->ready_warps[wp->index / 64] &= ~(1ull << (wp->index % 64));
}

/* ---- fibers ------------------------------------------------------------------------------------------------------------------------------- */

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
/* The portable way: right everywhere, about 20 times slower (swapcontext calls the kernel for the signal mask). */
static void simt_switch(void **save, void *load) {
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

/* Switches to fiber `to`, or to the worker's own stack if NULL; `dying`: the caller never comes back. */
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

static void land_at_random(worker *w, group *g);

/* The running fiber gives way to the next ready one, itself perhaps. */
static void reschedule(void) {
    worker *w = me;
    if (__builtin_expect(w->launch->failed.load(std::memory_order_relaxed), 0)) leave_fiber();
    if (__builtin_expect(copies == RANDOM_COPIES, 0)
        && (w->group->flight_count || w->group->store_count || w->self->own_count || w->group->products_parked))
        land_at_random(w, w->group);
    fiber *next = choose_fiber(w, w->group);
    if (next != w->self) switch_to(w, next, false);
}

/* Where a random schedule may interrupt. */
static void maybe_switch(void) {
    if (schedule == RANDOM) reschedule();
}

/* The running fiber waits until somebody sets it ready. */
static void block_fiber(fiber *f, fiber_state state) {
    f->state = state;
    clear_ready(f->block->group, f->warp, 1u << f->lane);
    reschedule();
}

static void note_site(fiber *f, const char *what, const char *file, int line) { f->warp->site[f->lane] = {what, file, line}; }

static void leave_fiber(void) {
    me->self->abandoned = 1;
    release(&me->launch->end_tag);
    switch_to(me, NULL, true);
    abort();
}

static void exit_thread(fiber *f);

extern "C" void simt_fiber_main(void) {
#if defined(SIMT_ASAN)
    // The first switch away from the worker's own stack is where its extent becomes known.
    if (!me->stack_bottom) __sanitizer_finish_switch_fiber(NULL, &me->stack_bottom, &me->stack_bytes);
    else __sanitizer_finish_switch_fiber(NULL, NULL, NULL);
#endif
    fiber *f = me->self;
    acquire(&me->launch->start_tag);
    f->block->started = 1;
    (*me->launch->body)();
    exit_thread(f);
    fiber *next = choose_fiber(me, me->group);
    switch_to(me, me->launch->failed.load(std::memory_order_relaxed) ? NULL : next, true);
    abort();
}

static void prepare_fiber(fiber *f, unsigned slot) {
    if (!f->stack) {
        size_t guard = sysconf(_SC_PAGESIZE);
        char *p = (char *)mmap(NULL, guard + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == (char *)MAP_FAILED || mprotect(p, guard, PROT_NONE)) {
            perror("simt: a fiber's stack");
            exit(2);
        }
        f->stack = p + guard;
    }
    if (f->abandoned) show(f->stack, STACK_BYTES);      // the redzones of frames that never returned
#if defined(SIMT_TSAN)
    if (f->tsan && (f->abandonments += f->abandoned) > 1000) {  // each leaves some frames on libtsan's shadow call stack; a new fiber is slow
        __tsan_destroy_fiber(f->tsan);
        f->tsan = NULL;
        f->abandonments = 0;
    }
    if (!f->tsan) f->tsan = __tsan_create_fiber(0);
#endif
    f->abandoned = 0;
    // Tops at one offset in the page would share the same few cache sets: four times slower.
    f->sp = first_frame(f->stack + STACK_BYTES - slot * 832 % 16384);
}

/* ---- groups ------------------------------------------------------------------------------------------------------------------------------- */

PLAIN_LOOP static void fill(void *at, int byte, size_t bytes) {
    char *p = (char *)at;
    for (; bytes && ((uintptr_t)p & 7); bytes--) *p++ = (char)byte;
    uint64_t pattern = 0x0101010101010101u * (unsigned char)byte;
    for (; bytes >= 8; bytes -= 8, p += 8) *(uint64_t *)p = pattern;
    for (; bytes; bytes--) *p++ = (char)byte;
}

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

static size_t dynamic_area(const launch *l) { return round_up(l->shape->dynamic_bytes, 16) + REDZONE; }

/* Shared memory of all blocks of the group. Nothing carries over from the group that used it before, in TSan's eyes either. */
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
    g->shared.reserve(MAX_VARIABLES);               // here, on the worker's stack: a fiber that allocates shows in TSan's eyes
    g->static_used = g->static_bytes = 0;
    size_t dynamic = l->shape->dynamic_bytes;
    for (unsigned b = 0; b < g->block_count; b++) {
        char *base = g->blocks[b].memory = g->memory + b * stride;
        fill(base, simt_poison_byte(), dynamic);
        fill(base + dynamic, REDZONE_BYTE, dynamic_area(l) - dynamic);
        show(base, dynamic);
    }
}

/* Tables of the mbarriers and copies; calloc, so that what is never used is never touched. */
static void prepare_copies(group *g, unsigned threads) {
    size_t room = (size_t)MAX_BARRIERS * g->block_count * threads;
    g->barrier_count = g->first_flight = g->flight_count = g->store_count = g->products_parked = 0;
    for (warpgroup *wg : g->warpgroups) {
        if (!wg) continue;
        wg->issued = wg->done = wg->parked = 0;
        for (sums &x : wg->all_sums) x.holders = 0;
    }
    if (!g->barriers) {
        g->barriers = (mbarrier *)calloc(MAX_BARRIERS * MAX_BLOCKS, sizeof *g->barriers);
        g->flights = (flight *)calloc(MAX_COPIES, sizeof *g->flights);
        g->stores = (store *)calloc(MAX_STORES, sizeof *g->stores);
    }
    if (g->live > g->own_copies_room) {
        free(g->own_copies);
        g->own_copies = (own_copy *)calloc((size_t)g->live * MAX_OWN_COPIES, sizeof *g->own_copies);
        g->own_copies_room = g->live;
    }
    if (room <= g->last_waited_room) return;
    free(g->last_waited);
    g->last_waited = (int *)calloc(room, sizeof *g->last_waited);
    g->last_waited_room = room;
}

/* Sets up the group at place `ordinal` of the launch order. */
static void start_group(worker *w, group *g, unsigned long long ordinal) {
    launch *l = w->launch;
    const simt_launch_shape *s = l->shape;
    unsigned long long number = schedule == FORWARD ? ordinal : schedule == REVERSE ? l->groups - 1 - ordinal : l->shuffled[ordinal];
    unsigned threads = s->block.x * s->block.y * s->block.z, warps = (threads + 31) / 32;
    dim3 c = s->cluster, clusters(s->grid.x / c.x, s->grid.y / c.y, s->grid.z / c.z);
    uint3 first = make_uint3(number % clusters.x * c.x, number / clusters.x % clusters.y * c.y, number / clusters.x / clusters.y * c.z);
    w->random = (l->seed + number) * 0x9e3779b97f4a7c15u;
    g->ordinal = ordinal;
    g->block_count = c.x * c.y * c.z;
    g->warp_count = g->block_count * warps;
    g->live = g->block_count * threads;
    g->current_warp = schedule == REVERSE ? g->warp_count - 1 : 0;
    g->yielded = g->cluster_arrived = g->cluster_phase = g->cluster_left = 0;
    if (g->fibers.size() < g->live) g->fibers.resize(g->live);
    if (g->warps.size() < g->warp_count) g->warps.resize(g->warp_count);
    if (g->blocks.size() < g->block_count) g->blocks.resize(g->block_count);
    w->copy_random = (copies_seed * 1000003 + l->seed + number) * 0x9e3779b97f4a7c15u + 1;
    prepare_memory(l, g);
    prepare_copies(g, threads);
    for (uint64_t &word : g->ready_warps) word = 0;
    for (unsigned b = 0; b < g->block_count; b++) {
        block *blk = &g->blocks[b];
        blk->group = g;
        blk->rank = b;
        blk->threads = threads;
        blk->exited = blk->started = blk->arrived = blk->barriers = blk->cluster_waited = 0;
        blk->predicate_count = 0;
        blk->fences = blk->note_count = blk->notes_lost = 0;
        for (named_barrier &n : blk->named) n.arrived = n.generation = 0;
        blk->index = make_uint3(first.x + b % c.x, first.y + b / c.x % c.y, first.z + b / c.x / c.y);
        for (unsigned &m : blk->mapped_after) m = 0;
#if defined(SIMT_TSAN)
        // Here, by the worker: a new fiber is ordered behind all that its creator has seen.
        for (auto &kind : blk->copiers)
            for (void *&t : kind)
                if (!t) t = __tsan_create_fiber(0);
#endif
        for (unsigned i = 0; i < warps; i++) {
            warp *wp = &g->warps[b * warps + i];
            unsigned count = threads - i * 32 < 32 ? threads - i * 32 : 32;
            wp->exist = wp->ready = count == 32 ? ~0u : (1u << count) - 1;
            wp->waiting = wp->yielded = wp->exited = 0;
            wp->index = b * warps + i;
            wp->lanes = &g->fibers[b * (size_t)threads + i * 32];
            wp->block = blk;
            for (sync_tag &t : wp->tags) t.mask = 0;
            g->ready_warps[wp->index / 64] |= 1ull << (wp->index % 64);
        }
        uint3 t = make_uint3(0, 0, 0);
        for (unsigned i = 0; i < threads; i++) {
            unsigned slot = b * threads + i;
            fiber *f = &g->fibers[slot];
            f->here.thread_idx = t;
            f->here.block_idx = blk->index;
            f->here.block_dim = s->block;
            f->here.grid_dim = s->grid;
            f->block = blk;
            f->warp = &g->warps[b * warps + i / 32];
            f->lane = i % 32;
            f->index = i;
            f->state = READY;
            f->cluster_arrivals = f->cluster_waits = f->inits_fenced = f->bulk_groups = f->own_groups = f->own_count = 0;
            f->own_copies = g->own_copies + (size_t)slot * MAX_OWN_COPIES;
            f->waits_for = NULL;
            f->products = f->product_groups = f->products_waited = f->wgmma_fences = f->fences_at_wait = f->held_turn = 0;
            for (held_sums &h : f->held) h.d = NULL;
            prepare_fiber(f, slot);
            if (++t.x == s->block.x) {
                t.x = 0;
                if (++t.y == s->block.y) t.y = 0, t.z++;
            }
        }
    }
    release(&l->start_tag);
}

static void check_redzone(const block *blk, size_t from, size_t to, const char *what, const char *file, int line) {
    const unsigned char *p = (const unsigned char *)blk->memory;
    for (size_t i = from; i < to; i++) {
        if (p[i] == REDZONE_BYTE) continue;
        fail_all(file, line, "shared memory was written %zu bytes past the end of %s", i - from, what);
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

static void check_copies_of_thread(fiber *f);
static void check_copies_of_block(block *blk);
static void check_products_of_thread(fiber *f);

/* ---- the end of a thread ----------------------------------------------------------------------------------------------------------------- */

static void exit_block(block *blk) {
    group *g = blk->group;
    check_copies_of_block(blk);
    for (unsigned p = 0; p < g->block_count; p++) {
        // A peer asked for our memory after `mapped_after - 1` barriers; only having waited for the next one makes that access past.
        if (p != blk->rank && blk->mapped_after[p] && blk->cluster_waited < blk->mapped_after[p])
            fail_all("cluster", 0, "a peer block gone: block rank %u exits, and no cluster barrier that it waited for orders the accesses of rank %u to its "
                     "shared memory before that", blk->rank, p);
    }
    if (g->block_count > 1) {
        size_t dynamic = me->launch->shape->dynamic_bytes;
        fill(blk->memory, simt_poison_byte(), dynamic);
        hide(blk->memory, dynamic);
        for (const shared_slot &s : g->shared) {
            fill(blk->memory + s.offset, simt_poison_byte(), s.variable->bytes);
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
        fail_all(blk->barrier_site.file, blk->barrier_site.line, "thread %u exited while %u threads of its block wait in __syncthreads", f->index, blk->arrived);
    for (unsigned m = wp->waiting; m; m &= m - 1) {
        unsigned lane = __builtin_ctz(m);
        if (wp->mask[lane] & bit)
            fail_all(wp->site[lane].file, wp->site[lane].line, "lane %u exited while lane %u waits for it in %s, mask 0x%08x",
                     f->lane, lane, wp->site[lane].what, wp->mask[lane]);
    }
    if (g->cluster_arrived && f->cluster_arrivals == g->cluster_phase)
        fail_all(g->cluster_site.file, g->cluster_site.line, "thread %u of cluster rank %u exited while others arrived at a cluster barrier", f->index, blk->rank);
    if (g->store_count || f->own_count) check_copies_of_thread(f);
    if (f->products != f->products_waited) check_products_of_thread(f);
    if (f->cluster_arrivals == g->cluster_phase + 1) g->cluster_left++;
    release(&me->launch->end_tag);
    f->state = EXITED;
    wp->exited |= bit;
    clear_ready(g, wp, bit);
    g->live--;
    me->progress++;
    if (++blk->exited == blk->threads) exit_block(blk);
}

/* ---- warp operations ---------------------------------------------------------------------------------------------------------------------- */

static const char *const operation_names[] = {
    "__syncwarp", "__shfl_sync", "__all_sync", "__any_sync", "__ballot_sync", "__match_any_sync", "a warp gather (cub)",
    "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync", "__reduce_max_sync",
    "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync",
};

unsigned simt_lane(void) { return me->self->lane; }

static bool same_file(const char *a, const char *b) { return a == b || !strcmp(a, b); }

static uint64_t reduce_values(const warp *wp, unsigned mask, simt_warp_operation operation) {
    uint32_t r = wp->value[__builtin_ctz(mask)];
    for (unsigned m = mask & (mask - 1); m; m &= m - 1) {
        uint32_t v = wp->value[__builtin_ctz(m)];
        switch (operation) {
        case SIMT_ADD: r += v; break;
        case SIMT_MIN_U32: r = v < r ? v : r; break;
        case SIMT_MAX_U32: r = v > r ? v : r; break;
        case SIMT_MIN_S32: r = (int32_t)v < (int32_t)r ? v : r; break;
        case SIMT_MAX_S32: r = (int32_t)v > (int32_t)r ? v : r; break;
        case SIMT_AND: r &= v; break;
        case SIMT_OR: r |= v; break;
        default: r ^= v; break;
        }
    }
    return r;
}

PLAIN_LOOP static void copy_bytes(void *to, const void *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) ((char *)to)[i] = ((const char *)from)[i];
}

/* All lanes of the mask have left their requests: computes everybody's result. Not inlined, here and below: the fewer cache lines of its stack a
   waiting fiber holds, the faster the switch to it. */
__attribute__((noinline)) static void finish_warp(warp *wp, unsigned mask, simt_warp_operation operation) {
    uint64_t result[32], common = 0;
    unsigned nonzero = 0;
    switch (operation) {
    case SIMT_SYNCWARP:
        return;
    case SIMT_SHFL:
        for (unsigned m = mask; m; m &= m - 1) {
            unsigned lane = __builtin_ctz(m), source = wp->argument[lane];
            if (!(mask >> source & 1))
                fail_all(wp->site[lane].file, wp->site[lane].line, "__shfl_sync: lane %u reads lane %u, which is not in the mask 0x%08x", lane, source, mask);
            result[lane] = wp->value[source];
        }
        for (unsigned m = mask; m; m &= m - 1) wp->value[__builtin_ctz(m)] = result[__builtin_ctz(m)];
        return;
    case SIMT_GATHER:
        for (unsigned m = mask; m; m &= m - 1) {
            unsigned lane = __builtin_ctz(m);
            size_t bytes = wp->gather_bytes[lane];
            if (!wp->gather_to[lane]) continue;
            for (unsigned n = mask; n; n &= n - 1)
                copy_bytes((char *)wp->gather_to[lane] + __builtin_ctz(n) * bytes, (const void *)wp->value[__builtin_ctz(n)], bytes);
        }
        return;
    case SIMT_MATCH_ANY:
        for (unsigned m = mask; m; m &= m - 1) {
            unsigned lane = __builtin_ctz(m), same = 0;
            for (unsigned n = mask; n; n &= n - 1) same |= (unsigned)(wp->value[__builtin_ctz(n)] == wp->value[lane]) << __builtin_ctz(n);
            result[lane] = same;
        }
        for (unsigned m = mask; m; m &= m - 1) wp->value[__builtin_ctz(m)] = result[__builtin_ctz(m)];
        return;
    case SIMT_ALL: case SIMT_ANY: case SIMT_BALLOT:
        for (unsigned m = mask; m; m &= m - 1) nonzero |= (unsigned)(wp->value[__builtin_ctz(m)] != 0) << __builtin_ctz(m);
        common = operation == SIMT_ALL ? nonzero == mask : operation == SIMT_ANY ? nonzero != 0 : nonzero;
        break;
    default:
        common = reduce_values(wp, mask, operation);
    }
    for (unsigned m = mask; m; m &= m - 1) wp->value[__builtin_ctz(m)] = common;
}

/* All lanes of the mask wait. True if for one another; false while one still waits for a different mask. */
__attribute__((noinline)) static bool lanes_agree(const warp *wp, unsigned mask, unsigned lane) {
    for (unsigned m = mask; m; m &= m - 1)
        if (wp->mask[__builtin_ctz(m)] != mask) return false;
    const wait_site *mine = &wp->site[lane];
    for (unsigned m = mask; m; m &= m - 1) {
        const wait_site *other = &wp->site[__builtin_ctz(m)];
        if (other->line != mine->line || wp->operation[__builtin_ctz(m)] != wp->operation[lane] || !same_file(other->file, mine->file))
            fail_all(mine->file, mine->line, "divergent warp operations: lane %u is in %s, lane %u in %s, %s:%d, mask 0x%08x",
                     lane, mine->what, __builtin_ctz(m), other->what, base_name(other->file), other->line, mask);
    }
    return true;
}

#if defined(SIMT_TSAN)
static char *warp_tag(warp *wp, unsigned mask, sync_tag **which) {
    sync_tag *t = wp->tags;
    while (t < wp->tags + MAX_TAGS - 1 && t->mask && t->mask != mask) t++;
    if (t->mask != mask) *t = {mask, 0, {0, 0}};
    *which = t;
    return &t->at[t->generation & 1];
}
#endif

__attribute__((noinline, cold)) static void bad_mask(const fiber *f, const char *what, unsigned mask, const char *file, int line) {
    const warp *wp = f->warp;
    if (!(mask >> f->lane & 1)) simt_fail(file, line, "%s: lane %u is not in the mask 0x%08x that it passes", what, f->lane, mask);
    if (mask & ~wp->exist) fail_all(file, line, "%s: the mask 0x%08x names lane %u, which does not exist", what, mask, __builtin_ctz(mask & ~wp->exist));
    fail_all(file, line, "%s: the mask 0x%08x names lane %u, which has exited", what, mask, __builtin_ctz(mask & wp->exited));
}

uint64_t simt_warp(simt_warp_operation operation, unsigned mask, uint64_t value, unsigned argument, const char *file, int line) {
    fiber *f = me->self;
    warp *wp = f->warp;
    unsigned lane = f->lane, bit = 1u << lane;
    const char *what = operation_names[operation];
    if (__builtin_expect(!(mask & bit) || (mask & (wp->exited | ~wp->exist)), 0)) bad_mask(f, what, mask, file, line);
    wp->value[lane] = value;
    wp->mask[lane] = mask;
    wp->argument[lane] = argument;
    wp->operation[lane] = operation;
    wp->site[lane] = {what, file, line};
    wp->waiting |= bit;
#if defined(SIMT_TSAN)
    sync_tag *entry = NULL;
    char *tag = operation == SIMT_SYNCWARP ? warp_tag(wp, mask, &entry) : NULL;
    if (tag) release(tag);
#endif
    if ((wp->waiting & mask) == mask && lanes_agree(wp, mask, lane)) {
        finish_warp(wp, mask, operation);
        wp->waiting &= ~mask;
        set_ready(f->block->group, wp, mask);
        me->progress++;
#if defined(SIMT_TSAN)
        if (tag) entry->generation++;
#endif
        reschedule();
    } else {
        block_fiber(f, IN_WARP);
    }
#if defined(SIMT_TSAN)
    if (tag) acquire(tag);
#endif
    return wp->value[lane];
}

void simt_warp_gather(unsigned mask, const void *mine, void *all, size_t bytes, const char *file, int line) {
    warp *wp = me->self->warp;
    wp->gather_to[simt_lane()] = all;
    wp->gather_bytes[simt_lane()] = bytes;
    simt_warp(SIMT_GATHER, mask, (uint64_t)mine, 0, file, line);
}

/* ---- block and cluster barriers, yield ------------------------------------------------------------------------------------------------------ */

int simt_block_barrier(int predicate, const char *file, int line) {
    fiber *f = me->self;
    block *blk = f->block;
    group *g = blk->group;
    char *tag = &blk->tag[blk->barriers & 1];       // two in turn: a fast thread must not add to what a slow one has yet to acquire
    note_site(f, "__syncthreads", file, line);
    if (blk->exited) fail_all(file, line, "__syncthreads: %u threads of the block have exited", blk->exited);
    if (!blk->arrived) blk->barrier_site = {"__syncthreads", file, line};
    else if (blk->barrier_site.line != line || !same_file(blk->barrier_site.file, file))
        fail_all(file, line, "divergent barriers: thread %u is in __syncthreads here, %u threads of its block in the one at %s:%d",
                 f->index, blk->arrived, base_name(blk->barrier_site.file), blk->barrier_site.line);
    release(tag);
    blk->predicate_count += predicate != 0;
    if (++blk->arrived == blk->threads) {
        blk->result = blk->predicate_count;
        blk->arrived = blk->predicate_count = 0;
        blk->barriers++;
        me->progress++;
        unsigned warps = (blk->threads + 31) / 32;
        for (warp *wp = f->warp - f->index / 32; warps--; wp++) set_ready(g, wp, wp->exist);
        // The order starts anew from the block's first thread, or from its last.
        if (schedule == FORWARD) g->current_warp = f->warp->index - f->index / 32;
        if (schedule == REVERSE) g->current_warp = f->warp->index - f->index / 32 + (blk->threads - 1) / 32;
        reschedule();
    } else {
        block_fiber(f, IN_BLOCK);
    }
    acquire(tag);
    return blk->result;
}

/* The block's warp of index `i` is there with some lanes and not with others. */
static bool split_warp(const warp *wp, const fiber *last, int barrier) {
    unsigned there = 0;
    for (unsigned m = wp->exist; m; m &= m - 1) {
        const fiber *f = &wp->lanes[__builtin_ctz(m)];
        if (f == last || (f->state == IN_NAMED && f->named == barrier)) there |= m & -m;
    }
    return there && there != wp->exist;
}

void simt_named_barrier(int barrier, int threads, const char *file, int line) {
    const char *what = "lk_named_barrier_sync";
    fiber *f = me->self;
    block *blk = f->block;
    maybe_switch();
    note_site(f, what, file, line);
    if (barrier < 1 || barrier >= NAMED_BARRIERS) simt_fail(file, line, "%s: barrier %d, not 1 to 15", what, barrier);
    if (threads < 32 || threads % 32 || (unsigned)threads > round_up(blk->threads, 32))
        simt_fail(file, line, "%s: %d threads, in a block of %u: not whole warps of it", what, threads, blk->threads);
    named_barrier *n = &blk->named[barrier];
    char *tag = &n->tag[n->generation & 1];
    if (n->arrived && n->threads != (unsigned)threads)
        fail_all(file, line, "%s: thread %u waits for %d threads at barrier %d, those at %s:%d for %u", what, f->index, threads,
                 barrier, base_name(n->site.file), n->site.line, n->threads);
    if (!n->arrived) n->site = {what, file, line};
    n->threads = threads;
    release(tag);
    if (++n->arrived < n->threads) {
        f->named = barrier;
        block_fiber(f, IN_NAMED);
        acquire(tag);
        return;
    }
    warp *first = f->warp - f->index / 32;
    for (unsigned i = 0; i < (blk->threads + 31) / 32; i++) {
        unsigned woken = 0;
        if (split_warp(&first[i], f, barrier))
            fail_all(file, line, "%s: %d threads have come to barrier %d, but of warp %u not all", what, threads, barrier, i);
        for (unsigned m = first[i].exist & ~first[i].ready; m; m &= m - 1) {
            const fiber *other = &first[i].lanes[__builtin_ctz(m)];
            if (other->state == IN_NAMED && other->named == barrier) woken |= m & -m;
        }
        if (woken) set_ready(blk->group, &first[i], woken);
    }
    n->arrived = 0;
    n->generation++;
    me->progress++;
    reschedule();
    acquire(tag);
}

unsigned simt_barriers_passed(void) { return me->self->block->barriers + me->self->cluster_waits; }

unsigned simt_cluster_ctarank(void) { return me->self->block->rank; }
unsigned simt_cluster_nctarank(void) { return me->group->block_count; }

static void cluster_arrive(bool publish, const char *file, int line) {
    fiber *f = me->self;
    group *g = me->group;
    if (f->cluster_arrivals != f->cluster_waits) simt_fail(file, line, "a second cluster arrive without a wait between");
    unsigned missing = g->block_count * f->block->threads - g->live - g->cluster_left;
    if (missing) fail_all(file, line, "cluster barrier: %u threads of the cluster have exited before it", missing);
    if (!g->cluster_arrived) g->cluster_site = {"a cluster barrier", file, line};
    if (publish || f->inits_fenced) release(&g->cluster_tag[g->cluster_phase & 1]);
    f->inits_fenced = 0;
    f->cluster_arrivals++;
    if (++g->cluster_arrived < g->live + g->cluster_left) return;
    g->cluster_arrived = g->cluster_left = 0;
    g->cluster_phase++;
    me->progress++;
    for (unsigned i = 0; i < g->warp_count; i++) {
        warp *wp = &g->warps[i];
        unsigned woken = 0;
        for (unsigned m = wp->exist & ~wp->ready; m; m &= m - 1)
            if (wp->lanes[__builtin_ctz(m)].state == IN_CLUSTER) woken |= m & -m;
        if (woken) set_ready(g, wp, woken);
    }
}

void simt_cluster_arrive(const char *file, int line) { cluster_arrive(true, file, line); }
void simt_cluster_arrive_relaxed(const char *file, int line) { cluster_arrive(false, file, line); }

void simt_cluster_wait(const char *file, int line) {
    fiber *f = me->self;
    group *g = me->group;
    if (f->cluster_arrivals == f->cluster_waits) simt_fail(file, line, "a cluster wait without an arrive before it");
    note_site(f, "a cluster barrier", file, line);
    char *tag = &g->cluster_tag[f->cluster_waits & 1];
    if (g->cluster_phase < f->cluster_arrivals) block_fiber(f, IN_CLUSTER);
    else reschedule();
    acquire(tag);
    f->cluster_waits++;
    if (f->block->cluster_waited < f->cluster_waits) f->block->cluster_waited = f->cluster_waits;
}

void simt_yield(const char *file, int line) {
    worker *w = me;
    fiber *f = w->self;
    note_site(f, "a spin loop", file, line);
    f->warp->yielded |= 1u << f->lane;
    w->group->yielded++;
    block_fiber(f, YIELDED);
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

/* ---- shared memory ------------------------------------------------------------------------------------------------------------------------- */

void *simt_shared(const simt_variable *v) {
    fiber *f = me->self;
    group *g = me->group;
    for (const shared_slot &s : g->shared)
        if (s.variable == v) return f->block->memory + s.offset;
    launch *l = me->launch;
    size_t base = dynamic_area(l), alignment = v->alignment > 16 ? v->alignment : 16;
    size_t offset = round_up(base + g->static_used, alignment);
    size_t end = round_up(offset + v->bytes, 16) + REDZONE, dynamic = l->shape->dynamic_bytes;
    g->static_bytes = round_up(g->static_bytes, v->alignment) + v->bytes;
    if (g->static_bytes > STATIC_BYTES || end > g->memory_stride)
        simt_fail(v->file, v->line, "static shared memory: %s brings it to %zu bytes, more than 48 KiB", v->name, g->static_bytes);
    if (g->static_bytes + dynamic > l->shape->most_bytes)
        simt_fail(v->file, v->line, "shared memory: %zu bytes static with %s, %zu dynamic, together more than %zu", g->static_bytes, v->name, dynamic,
                  l->shape->most_bytes);
    // The same offset in every block of the cluster, so that a peer's copy is found without its having come this far.
    for (unsigned b = 0; b < g->block_count; b++) {
        char *p = g->blocks[b].memory + offset;
        fill(p, simt_poison_byte(), v->bytes);
        fill(p + v->bytes, REDZONE_BYTE, end - offset - v->bytes);
        if (g->blocks[b].exited < g->blocks[b].threads) show(p, v->bytes);
    }
    g->static_used = end - base;
    g->shared.push_back({v, offset});
    return f->block->memory + offset;
}

void *simt_dynamic_shared(size_t bytes, const char *file, int line) {
    if (bytes > me->launch->shape->dynamic_bytes)
        simt_fail(file, line, "the kernel's dynamic shared memory takes %zu bytes, the launch gives %zu", bytes, me->launch->shape->dynamic_bytes);
    return me->self->block->memory;
}

void *simt_cluster_map(const void *smem, unsigned rank, const char *file, int line) {
    fiber *f = me->self;
    group *g = me->group;
    size_t offset = (const char *)smem - f->block->memory;
    if (rank >= g->block_count) simt_fail(file, line, "there is no rank %u in a cluster of %u blocks", rank, g->block_count);
    if (offset >= g->memory_stride) simt_fail(file, line, "%p is not in this block's shared memory", smem);
    block *peer = &g->blocks[rank];
    if (peer == f->block) return (void *)smem;
    if (!f->cluster_waits) fail_all(file, line, "shared memory of rank %u used before the first cluster barrier: that block may not have started", rank);
    if (peer->exited == peer->threads) fail_all(file, line, "a peer block gone: rank %u has exited, its shared memory with it", rank);
    if (peer->mapped_after[f->block->rank] < f->cluster_arrivals + 1) peer->mapped_after[f->block->rank] = f->cluster_arrivals + 1;
    return peer->memory + offset;
}

/* ---- mbarriers ----------------------------------------------------------------------------------------------------------- */

static const uint64_t BARRIER_MAGIC = 0x6d62617272000000u;      // the low 24 bits: the index in the group's table

/* The variable of some block of the group that `at` lies in; *room: how many bytes of it follow. NULL if none. */
static const char *find_variable(const group *g, const void *at, size_t *offset, size_t *room) {
    size_t place = (const char *)at - g->memory, dynamic = me->launch->shape->dynamic_bytes;
    if (place >= g->memory_stride * g->block_count) return NULL;
    place %= g->memory_stride;
    if (place < dynamic) {
        *offset = place;
        *room = dynamic - place;
        return "the dynamic shared memory";
    }
    for (const shared_slot &s : g->shared) {
        if (place < s.offset || place >= s.offset + s.variable->bytes) continue;
        *offset = place - s.offset;
        *room = s.variable->bytes - *offset;
        return s.variable->name;
    }
    return NULL;
}

static const char *place_name(const group *g, const void *at) {
    constexpr size_t size = sizeof me->place_names[0];
    char *text = me->place_names[me->places++ % 4];
    size_t offset, room;
    const char *name = find_variable(g, at, &offset, &room);
    if (!name) snprintf(text, size, "%p", at);
    else if (offset) snprintf(text, size, "%s + %zu bytes", name, offset);
    else snprintf(text, size, "%s", name);
    return text;
}

static block *block_of(group *g, const void *at) { return &g->blocks[((const char *)at - g->memory) / g->memory_stride]; }

/* The barrier at `at`, in shared memory of block `blk`; any block's if NULL. */
static mbarrier *find_barrier(const uint64_t *at, const block *blk, const char *what, const char *file, int line, void *pc) {
    group *g = me->group;
    size_t offset, room;
    if (!find_variable(g, at, &offset, &room) || room < 8 || (blk && block_of(g, at) != blk))
        simt_fail(file, line, "%s: %p is not in %s shared memory", what, (const void *)at,
                  blk ? "this block's" : "the cluster's");
    if ((uintptr_t)at % 8) simt_fail(file, line, "%s: %s is not aligned to 8 bytes", what, place_name(g, at));
    if (block_of(g, at)->exited == block_of(g, at)->threads)
        fail_all(file, line, "%s: a peer block gone: rank %u has exited, its mbarrier %s with it", what, block_of(g, at)->rank,
                 place_name(g, at));
    touch(at, 8, false, pc);
    size_t index = *at ^ BARRIER_MAGIC;
    if (index >= g->barrier_count || g->barriers[index].at != at)
        fail_all(file, line, "%s: %s is not an initialised mbarrier", what, place_name(g, at));
    return &g->barriers[index];
}

static void set_integers(int *at, int value, size_t count) __attribute__((noinline));
PLAIN_LOOP static void set_integers(int *at, int value, size_t count) {
    for (size_t i = 0; i < count; i++) at[i] = value;
}

static int *last_waited(group *g, const mbarrier *bar, unsigned thread) {
    return g->last_waited + (bar - g->barriers) * bar->block->threads + thread;
}

void simt_mbarrier_init(uint64_t *at, unsigned count, const char *file, int line) {
    fiber *f = me->self;
    group *g = me->group;
    const char *what = "lk_mbarrier_init";
    size_t offset, room;
    if (!find_variable(g, at, &offset, &room) || room < 8 || block_of(g, at) != f->block)
        simt_fail(file, line, "%s: %p is not in this block's shared memory", what, (void *)at);
    if ((uintptr_t)at % 8) simt_fail(file, line, "%s: %s is not aligned to 8 bytes", what, place_name(g, at));
    if (!count || count > MAX_ARRIVALS) simt_fail(file, line, "%s: a count of %u, not 1 to 2^20 - 1", what, count);
    size_t index = *at ^ BARRIER_MAGIC;
    if (index < g->barrier_count && g->barriers[index].at == at)
        fail_all(file, line, "%s: %s is in use, initialised at %s:%d", what, place_name(g, at),
                 base_name(g->barriers[index].born.file),
                 g->barriers[index].born.line);
    for (index = 0; index < g->barrier_count && g->barriers[index].at != at; index++);
    if (index == MAX_BARRIERS * g->block_count) simt_fail(file, line, "%s: more than %u mbarriers a block", what, MAX_BARRIERS);
    if (index == g->barrier_count) g->barrier_count++;
    mbarrier *bar = &g->barriers[index];
    *bar = mbarrier();
    bar->at = at;
    bar->block = f->block;
    bar->count = bar->pending = count;
    bar->initialiser = f->index;
    bar->landed_in = bar->waited_for = -1;
    bar->born = {what, file, line};
    set_integers(last_waited(g, bar, 0), -2, f->block->threads);
    // the other operations read, in TSan's eyes: they may meet one another, but not this
    touch(at, 8, true, __builtin_return_address(0));
    *at = BARRIER_MAGIC | index;
}

static void publish_barriers(const fiber *f) {
    group *g = f->block->group;
    for (unsigned i = 0; i < g->barrier_count; i++)
        if (g->barriers[i].block == f->block && g->barriers[i].initialiser == f->index) g->barriers[i].fenced = 1;
}
void simt_fence_mbarrier_init(void) {
    publish_barriers(me->self);
    me->self->inits_fenced = 1;
}

static void check_fenced(const mbarrier *bar, const char *what, const char *file, int line) {
    if (bar->fenced) return;
    fail_all(file, line, "%s: no lk_fence_mbarrier_init follows the init of mbarrier %s at %s:%d", what,
             place_name(me->group, bar->at),
             base_name(bar->born.file), bar->born.line);
}

/* After each change: ends the phase if nothing is missing any more, and wakes those who wait for it. */
static void settle(mbarrier *bar, const char *what, const char *file, int line) {
    group *g = bar->block->group;
    if (bar->bytes > MAX_ARRIVALS || bar->bytes < -MAX_ARRIVALS) {
        fail_all(file, line, "%s: the byte count of mbarrier %s leaves its range: %d", what, place_name(g, bar->at),
                 bar->bytes);
        return;
    }
    if (bar->pending || bar->bytes) return;
    if (bar->in_flight) {
        fail_all(file, line,
                 "%s: phase %u of mbarrier %s ends while %zu bytes are on their way to it: fewer announced than copied", what,
                 bar->phase,
                 place_name(g, bar->at), bar->in_flight);
        return;
    }
    if (bar->waking) {
        fail_all(file, line,
                 "%s: phase %u of mbarrier %s ends before %u threads that wait for phase %u could see its end: one parity "
                 "later they wait for ever",
                 what, bar->phase, place_name(g, bar->at), bar->waking, bar->phase - 1);
        return;
    }
    bar->phase++;
    bar->pending = bar->count;
    bar->from_peers[bar->phase & 1] = 0;
    me->progress++;
    if (!bar->parked) return;
    bar->waking = bar->parked;
    bar->parked = 0;
    fiber *all = &g->fibers[bar->block->rank * (size_t)bar->block->threads];
    for (unsigned i = 0; i < bar->block->threads; i++)
        if (all[i].state == IN_MBARRIER && all[i].waits_for == bar) set_ready(g, all[i].warp, 1u << all[i].lane);
}

/* The barrier counts bytes, so whoever waited for "the phase before the first" read what no copy had brought. */
static void mark_bytes(mbarrier *bar) {
    bar->counts_bytes = 1;
    if (bar->passed.file)
        fail_all(bar->passed.file, bar->passed.line,
                 "wrong parity: the wait for parity 1 returned at once, before the first phase of mbarrier %s, which counts "
                 "bytes",
                 place_name(me->group, bar->at));
}

static void arrive(mbarrier *bar, unsigned bytes, unsigned arrivals, const char *what, const char *file, int line) {
    if (bytes) mark_bytes(bar);
    if (bytes > MAX_ARRIVALS) simt_fail(file, line, "%s: %u bytes, more than 2^20 - 1", what, bytes);
    bar->bytes += (int)bytes;
    if (arrivals && !bar->pending) fail_all(file, line, "%s: an arrival too many at %s", what, barrier_text(me->group, bar));
    bar->pending -= arrivals;
    if (arrivals) release(&bar->tag[bar->phase & 1]);
    settle(bar, what, file, line);
}

void simt_mbarrier_arrive(uint64_t *at, unsigned arrivals, unsigned bytes, const char *file, int line) {
    const char *what = !arrivals ? "lk_mbarrier_expect_tx" : bytes ? "lk_mbarrier_arrive_expect_tx" : "lk_mbarrier_arrive";
    maybe_switch();
    arrive(find_barrier(at, me->self->block, what, file, line, __builtin_return_address(0)), bytes, arrivals, what, file, line);
}

unsigned simt_cluster_address(const void *smem, unsigned rank, const char *file, int line) {
    fiber *f = me->self;
    group *g = me->group;
    size_t offset = (const char *)smem - f->block->memory;
    if (rank >= g->block_count) simt_fail(file, line, "there is no rank %u in a cluster of %u blocks", rank, g->block_count);
    if (offset >= g->memory_stride) simt_fail(file, line, "%p is not in this block's shared memory", smem);
    return (unsigned)(rank * g->memory_stride + offset);
}

/* A peer's memory is there once the block has passed a cluster barrier. */
static char *cluster_pointer(unsigned address, const char *what, const char *file, int line) {
    group *g = me->group;
    if (address >= g->memory_stride * g->block_count)
        simt_fail(file, line, "%s: 0x%x is not in the cluster's shared memory", what, address);
    char *at = g->memory + address;
    if (block_of(g, at) != me->self->block && !me->self->cluster_waits)
        fail_all(file, line,
                 "%s: shared memory of rank %u used before the first cluster barrier: that block may not have started", what,
                 block_of(g, at)->rank);
    return at;
}

void simt_mbarrier_arrive_remote(unsigned address, const char *file, int line) {
    const char *what = "lk_mbarrier_arrive_remote";
    maybe_switch();
    mbarrier *bar = find_barrier((uint64_t *)cluster_pointer(address, what, file, line), NULL, what, file, line,
                                 __builtin_return_address(0));
    check_fenced(bar, what, file, line);
    if (bar->block != me->self->block) bar->from_peers[bar->phase & 1] = 1;
    arrive(bar, 0, 1, what, file, line);
}

/* The wait for `phase` is over. */
static void pass(mbarrier *bar, int phase, int cluster_scope, const char *what, const char *file, int line) {
    if (phase < 0) {
        if (!bar->passed.file) bar->passed = {what, file, line};
        if (bar->counts_bytes) mark_bytes(bar);
        return;
    }
    if (bar->waited_for < phase) bar->waited_for = phase;
    if (!cluster_scope && bar->from_peers[phase & 1])
        fail_all(file, line, "%s: peers arrived at mbarrier %s or stored to it in phase %d: that takes %s_cluster", what,
                 place_name(me->group, bar->at),
                 phase, what);
    acquire(&bar->tag[phase & 1]);
}

static void check_parity(unsigned parity, const char *what, const char *file, int line) {
    if (parity > 1) simt_fail(file, line, "%s: a parity of %u, not 0 or 1", what, parity);
}

bool simt_mbarrier_try_wait(uint64_t *at, unsigned parity, int cluster_scope, const char *file, int line) {
    const char *what = "lk_mbarrier_try_wait_parity";
    check_parity(parity, what, file, line);
    mbarrier *bar = find_barrier(at, me->self->block, what, file, line, __builtin_return_address(0));
    if ((bar->phase & 1) == parity) simt_yield(file, line);
    if ((bar->phase & 1) == parity) return false;
    pass(bar, (int)bar->phase - 1, cluster_scope, what, file, line);
    return true;
}

void simt_mbarrier_wait(uint64_t *at, unsigned parity, int cluster_scope, const char *file, int line) {
    const char *what = "lk_mbarrier_wait_parity";
    fiber *f = me->self;
    check_parity(parity, what, file, line);
    maybe_switch();
    mbarrier *bar = find_barrier(at, f->block, what, file, line, __builtin_return_address(0));
    int phase = (int)bar->phase - 1, *last = last_waited(me->group, bar, f->index);
    if ((bar->phase & 1) == parity) {
        phase = f->waits_phase = bar->phase;
        f->waits_for = bar;
        bar->parked++;
        note_site(f, what, file, line);
        block_fiber(f, IN_MBARRIER);
        bar->waking--;
        f->waits_for = NULL;
    } else if (*last == phase) {
        fail_all(file, line,
                 "wrong parity: the wait for parity %u returned at once, for phase %d of mbarrier %s, which this thread has "
                 "waited for before",
                 parity, phase, place_name(me->group, at));
    }
    *last = phase;
    pass(bar, phase, cluster_scope, what, file, line);
}

/* ---- asynchronous copies ----------------------------------------------------------------------------------------------------
   A load or st.async is a flight until it lands; its destination is poison meanwhile. A bulk store stays in the table of
   stores, landed or not, until its thread has waited for it. In TSan's eyes a copy is a thread of its own that runs where the
   copy is issued and ends at the barrier's phase or the wait for the bulk group; another one, ordered by nothing but fences
   and landings, reads what bulk stores read. A cp.async is its thread's alone, which lands it in the wait: in TSan's eyes the
   thread reads and writes both where it issues and where it waits. */

enum copier { LOADER, READER, WRITER, FENCED_READER };

#if defined(SIMT_TSAN)
/* The running fiber goes on as a copier, ordered behind what `issue` was released by. */
static void become_copier(copier who, char *issue) {
    block *blk = me->self->block;
    void **t = &blk->copiers[who][who == FENCED_READER ? 0 : blk->copier_turn++ % COPIERS];
    __tsan_switch_to_fiber(*t, 1);
    acquire(who == FENCED_READER ? &blk->fence_tag : issue);
}
static void end_copier(char *done) {
    release(done);
    release(&me->launch->end_tag);
    __tsan_switch_to_fiber(me->self->tsan, 1);
}
static void copier_access(copier who, const void *read, const void *write, size_t bytes, char *done, void *pc) {
    if (who != FENCED_READER) release(&me->self->issue_tag);
    become_copier(who, &me->self->issue_tag);
    if (read) touch(read, bytes, false, pc);
    if (write) touch(write, bytes, true, pc);
    if (who == LOADER && write) release(&block_of(me->group, write)->fence_tag);
    end_copier(done);
}
#else
static void copier_access(copier, const void *, const void *, size_t, char *, void *) {}
#endif

PLAIN_LOOP static void copy_words(void *to, const void *from, size_t bytes) {
    for (size_t i = 0; i < bytes / 8; i++) ((uint64_t *)to)[i] = ((const uint64_t *)from)[i];
}

static uint64_t hash_of(const void *at, size_t bytes) {
    const uint64_t *word = (const uint64_t *)at, odd = 0x9e3779b97f4a7c15u;
    uint64_t h[4] = {bytes, 1, 2, 3};                   // four at a time: a multiplication takes a few cycles
    size_t i = 0;
    for (; i + 4 <= bytes / 8; i += 4)
        for (unsigned n = 0; n < 4; n++) h[n] = (h[n] ^ word[i + n]) * odd, h[n] ^= h[n] >> 29;
    for (; i < bytes / 8; i++) h[0] = (h[0] ^ word[i]) * odd, h[0] ^= h[0] >> 29;
    for (unsigned n = 1; n < 4; n++) h[0] = (h[0] ^ h[n]) * odd, h[0] ^= h[0] >> 29;
    return h[0];
}

static bool overlap(const char *a, size_t a_bytes, const char *b, size_t b_bytes) { return a < b + b_bytes && b < a + a_bytes; }

static void forget_notes(block *blk, const char *at, size_t bytes) {
    for (unsigned i = 0; i < blk->note_count;) {
        range_note *n = &blk->notes[i];
        if (overlap(at, bytes, n->from, n->to - n->from)) *n = blk->notes[--blk->note_count];
        else i++;
    }
}
static void take_note(block *blk, const char *at, size_t bytes) {
    forget_notes(blk, at, bytes);
    if (blk->note_count == MAX_NOTES) blk->notes_lost = 1;
    else blk->notes[blk->note_count++] = {at, at + bytes, hash_of(at, bytes), blk->fences};
}

enum written { UNWRITTEN, FENCED, UNFENCED };

/* Whether threads wrote part of the range since the last copy there, and whether with no fence executed since. Which thread
   fenced when is TSan's to judge. */
static written written_since(const block *blk, const char *at, size_t bytes) {
    const char *end = at + bytes;
    unsigned since = 0, written = 0;
    while (at < end) {
        const range_note *here = NULL;
        const char *next = end;
        for (unsigned i = 0; i < blk->note_count; i++) {
            const range_note *n = &blk->notes[i];
            if (n->from <= at && at < n->to) here = n;
            else if (n->from > at && n->from < next) next = n->from;
        }
        if (!here) {
            written |= !blk->notes_lost;
        } else if (hash_of(here->from, here->to - here->from) != here->hash) {
            written = 1;
            if (since < here->fences) since = here->fences;
        }
        at = here ? here->to : next;
    }
    return !written ? UNWRITTEN : blk->fences == since ? UNFENCED : FENCED;
}

static void check_global(const void *at, size_t bytes, const char *what, const char *file, int line) {
    group *g = me->group;
    if ((size_t)((const char *)at - g->memory) < g->memory_stride * g->block_count)
        simt_fail(file, line, "%s: %p is not in global memory", what, at);
    const void *bad = first_hidden(at, bytes);
    if (bad)
        simt_fail(file, line, "%s: %u bytes at %p leave their allocation at byte %zu", what, (unsigned)bytes, at,
                  (size_t)((const char *)bad - (const char *)at));
#if !defined(SIMT_TSAN)                                         // its lock would order the threads that ask
    if (!simt_range_fits(at, bytes))
        simt_fail(file, line, "%s: %u bytes at %p leave their allocation", what, (unsigned)bytes, at);
#endif
}

static void check_bulk(const void *shared, const void *global, unsigned bytes, const char *what, const char *file, int line) {
    group *g = me->group;
    size_t offset, room;
    if ((uintptr_t)shared % 16) simt_fail(file, line, "%s: the shared address %p is not a multiple of 16", what, shared);
    if ((uintptr_t)global % 16) simt_fail(file, line, "%s: the global address %p is not a multiple of 16", what, global);
    if (!bytes || bytes % 16) simt_fail(file, line, "%s: a size of %u bytes, not a multiple of 16", what, bytes);
    const char *name = find_variable(g, shared, &offset, &room);
    if (!name || block_of(g, shared) != me->self->block)
        simt_fail(file, line, "%s: %p is not in this block's shared memory", what, shared);
    if (bytes > room)
        simt_fail(file, line, "%s: %u bytes from byte %zu of %s, which ends after %zu", what, bytes, offset, name, room);
    check_global(global, bytes, what, file, line);
}

/* What comes in must not meet a copy that is under way there. */
static void check_destination(const char *to, size_t bytes, const char *what, const char *file, int line) {
    group *g = me->group;
    for (unsigned i = 0; i < g->flight_count; i++) {
        const flight *x = &g->flights[(g->first_flight + i) % MAX_COPIES];
        if (overlap(to, bytes, x->to, x->bytes))
            fail_all(file, line, "%s: %s is still being filled by the copy issued at %s:%d", what, place_name(g, to),
                     base_name(x->site.file), x->site.line);
    }
    for (unsigned i = 0; i < g->store_count; i++) {
        const store *x = &g->stores[i];
        if (overlap(to, bytes, x->from, x->bytes))
            fail_all(file, line, "%s: %s is the source of the bulk store issued at %s:%d, which has not been waited for", what,
                     place_name(g, to),
                     base_name(x->site.file), x->site.line);
    }
    const unsigned each = 1024 / WARPGROUP, first = block_of(g, to)->rank * each;
    for (unsigned i = first; i < first + each; i++) {
        const warpgroup *wg = g->warpgroups[i];
        for (unsigned n = wg ? wg->done : 0; wg && n < wg->issued; n++) {
            const product *x = &wg->products[n % MAX_PRODUCTS];
            for (unsigned j = 0; j < x->atoms; j++)
                if (overlap(to, bytes, x->atom[j].at, x->atom[j].bytes))
                    fail_all(file, line, "%s: %s is an operand of the wgmma issued at %s:%d, which has not been waited for",
                             what, place_name(g, x->atom[j].at < to ? to : x->atom[j].at), base_name(x->site.file),
                             x->site.line);
        }
    }
}

/* The source of a store, or an operand of a wgmma, must be there. */
static void check_landed(const char *from, size_t bytes, const char *what, const char *file, int line) {
    group *g = me->group;
    for (unsigned i = 0; i < g->flight_count; i++) {
        const flight *x = &g->flights[(g->first_flight + i) % MAX_COPIES];
        if (overlap(from, bytes, x->to, x->bytes))
            fail_all(file, line, "%s: %s is still being filled by the copy issued at %s:%d", what,
                     place_name(g, x->to > from ? x->to : from), base_name(x->site.file), x->site.line);
    }
}

/* ---- tensor copies ------------------------------------------------------------------------------------------------------ */

/* The columns of row r of the box that are in the matrix: from *first to before *last. */
static bool box_row(const tensor_box *b, unsigned r, int64_t *first, int64_t *last) {
    const int64_t y = (int64_t)b->at[1] + r, x = b->at[0];
    *first = x < 0 ? -x : 0;
    *last = b->size[0] - x < b->box[0] ? b->size[0] - x : b->box[0];
    return y >= 0 && y < b->size[1] && *first < *last;
}
static char *box_place(const tensor_box *b, unsigned r, int64_t column) {
    return b->base + ((int64_t)b->at[1] + r) * b->stride + (b->at[0] + column) * (int64_t)b->element;
}
/* Where the 16 bytes at an address of shared memory are in a swizzle of `span` bytes. */
static char *swizzled(const char *at, unsigned span) {
    const uintptr_t mask = span / 16 - (span > 0);
    return (char *)at + (((uintptr_t)at ^ ((uintptr_t)at >> 7 & mask) << 4) - (uintptr_t)at);
}

static void add_float(char *to, const char *from) {
    uint32_t *at = (uint32_t *)to, old = __atomic_load_n(at, __ATOMIC_RELAXED), sum;
    do {
        float x, y;
        __builtin_memcpy(&x, &old, 4);
        __builtin_memcpy(&y, from, 4);
        x += y;
        __builtin_memcpy(&sum, &x, 4);
    } while (!__atomic_compare_exchange_n(at, &old, sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

enum box_motion { BOX_IN, BOX_OUT, BOX_ADD };

/* Moves the box between global memory and shared memory at `at`. */
PLAIN_LOOP static void move_box(const tensor_box *b, char *at, box_motion motion) {
    const int64_t each = 16 / b->element;
    for (unsigned r = 0; r < b->box[1]; r++) {
        int64_t first, last;
        if (!box_row(b, r, &first, &last)) first = last = 0;
        for (int64_t column = 0; column < b->box[0]; column += each, at += 16) {
            char *chunk = swizzled(at, b->span);
            const int64_t low = first > column ? first : column, high = last < column + each ? last : column + each;
            if (motion == BOX_IN && high - low < each) ((uint64_t *)chunk)[0] = ((uint64_t *)chunk)[1] = 0;
            if (low >= high) continue;
            char *global = box_place(b, r, low), *shared = chunk + (low - column) * b->element;
            const int64_t bytes = (high - low) * b->element;
            if (motion == BOX_ADD)
                for (int64_t i = 0; i < bytes; i += 4) add_float(global + i, shared + i);
            else if (bytes == 16)
                for (unsigned i = 0; i < 16; i += 8)
                    __builtin_memcpy((motion == BOX_IN ? shared : global) + i, (motion == BOX_IN ? global : shared) + i, 8);
            else
                for (int64_t i = 0; i < bytes; i += 2)
                    __builtin_memcpy((motion == BOX_IN ? shared : global) + i, (motion == BOX_IN ? global : shared) + i, 2);
        }
    }
}

static unsigned box_bytes(const tensor_box *b) { return b->box[0] * b->box[1] * b->element; }

/* What TSan sees of the box in global memory. Additions come as reads: they meet one another, but no plain write. */
#if defined(SIMT_TSAN)
static void touch_box(const tensor_box *b, bool write, void *pc) {
    for (unsigned r = 0; r < b->box[1]; r++) {
        int64_t first, last;
        if (box_row(b, r, &first, &last)) touch(box_place(b, r, first), (last - first) * b->element, write, pc);
    }
}
static void copier_box(copier who, const tensor_box *b, const void *write_shared, bool write_global, char *done, void *pc) {
    release(&me->self->issue_tag);
    become_copier(who, &me->self->issue_tag);
    touch_box(b, write_global, pc);
    if (write_shared) {
        touch(write_shared, box_bytes(b), true, pc);
        release(&block_of(me->group, write_shared)->fence_tag);
    }
    end_copier(done);
}
#else
static void copier_box(copier, const tensor_box *, const void *, bool, char *, void *) {}
#endif

static void land(flight x) {
    block *blk = block_of(me->group, x.to);
    if (x.box.element) {
        move_box(&x.box, x.to, BOX_IN);
        take_note(blk, x.to, x.bytes);
    } else if (x.from) {
        copy_words(x.to, x.from, x.bytes);
        take_note(blk, x.to, x.bytes);
    } else {
        forget_notes(blk, x.to, x.bytes);
        *(uint64_t *)x.to = x.value;
    }
    x.bar->in_flight -= x.bytes;
    x.bar->bytes -= (int)x.bytes;
    x.bar->landed_in = (int)x.bar->phase;
    if (x.peer) x.bar->from_peers[x.bar->phase & 1] = 1;
    settle(x.bar, x.site.what, x.site.file, x.site.line);
}

static void land_flight(group *g, unsigned i) {
    flight *first = &g->flights[g->first_flight], x = g->flights[(g->first_flight + i) % MAX_COPIES];
    g->flights[(g->first_flight + i) % MAX_COPIES] = *first;
    g->first_flight = (g->first_flight + 1) % MAX_COPIES;
    g->flight_count--;
    land(x);
}

static void land_store(store *x) {
    if (x->landed) return;
    if (x->box.element) move_box(&x->box, (char *)x->from, x->add ? BOX_ADD : BOX_OUT);
    else copy_words(x->to, x->from, x->bytes);
    x->landed = 1;
}

/* 4, 8 or 16 aligned bytes. There are millions of these, so not by loops. */
static void copy_few(char *to, const char *from, unsigned bytes) {
    if (bytes == 4) {
        *(uint32_t *)to = *(const uint32_t *)from;
        return;
    }
    *(uint64_t *)to = *(const uint64_t *)from;
    if (bytes == 16) ((uint64_t *)to)[1] = ((const uint64_t *)from)[1];
}

static void land_own(own_copy *x) {
    if (x->landed) return;
    copy_few(x->to, x->from, x->bytes);
    x->landed = 1;
}

/* Nothing else can run: one copy lands, any one if they are in random order. Bulk stores wait for their wait. */
static void land_one(worker *w, group *g) {
    land_flight(g, copies == RANDOM_COPIES ? next_of(&w->copy_random) % g->flight_count : 0);
}

static bool finish_products(worker *w, group *g);

static void land_at_random(worker *w, group *g) {
    uint64_t r = next_of(&w->copy_random);
    if (r & 3) return;
    if (g->products_parked && (r >>= 2, r & 1) && finish_products(w, g)) return;
    const unsigned shared = g->flight_count + g->store_count;
    if (shared + w->self->own_count == 0) return;
    r = (r >> 2) % (shared + w->self->own_count);
    if (r < g->flight_count) land_flight(g, r);
    else if (r < shared) land_store(&g->stores[r - g->flight_count]);
    else land_own(&w->self->own_copies[r - shared]);
}

static void launch_flight(const flight *x) {
    group *g = me->group;
    if (copies != EAGER) fill(x->to, simt_poison_byte(), x->bytes);
    x->bar->in_flight += x->bytes;
    if (copies == EAGER) {
        land(*x);
        return;
    }
    if (g->flight_count == MAX_COPIES) land_flight(g, 0);
    g->flights[(g->first_flight + g->flight_count++) % MAX_COPIES] = *x;
}

void simt_bulk_load(void *shared, const void *global, unsigned bytes, uint64_t *at, const char *file, int line) {
    const char *what = "lk_cp_async_bulk_load";
    fiber *f = me->self;
    maybe_switch();
    check_bulk(shared, global, bytes, what, file, line);
    mbarrier *bar = find_barrier(at, f->block, what, file, line, __builtin_return_address(0));
    check_fenced(bar, what, file, line);
    mark_bytes(bar);
    check_destination((char *)shared, bytes, what, file, line);
    forget_notes(f->block, (char *)shared, bytes);
    copier_access(LOADER, global, shared, bytes, &bar->tag[bar->phase & 1], __builtin_return_address(0));
    flight x = {(char *)shared, (const char *)global, 0, bytes, 0, bar, {what, file, line}, {}};
    launch_flight(&x);
}

void simt_st_async(unsigned to_address, uint64_t value, unsigned bar_address, const char *file, int line) {
    const char *what = "lk_st_async_b64";
    group *g = me->group;
    size_t offset, room;
    maybe_switch();
    char *to = cluster_pointer(to_address, what, file, line);
    mbarrier *bar = find_barrier((uint64_t *)cluster_pointer(bar_address, what, file, line), NULL, what, file, line,
                                 __builtin_return_address(0));
    if (to_address % 8)
        simt_fail(file, line, "%s: the address of rank %u's %s is not a multiple of 8", what, block_of(g, to)->rank,
                  place_name(g, to));
    if (!find_variable(g, to, &offset, &room) || room < 8)
        simt_fail(file, line, "%s: 8 bytes at 0x%x are in no shared variable", what, to_address);
    if (bar->block != block_of(g, to))
        simt_fail(file, line, "%s: the store goes to rank %u, its mbarrier %s is in rank %u", what, block_of(g, to)->rank,
                  place_name(g, bar->at), bar->block->rank);
    check_fenced(bar, what, file, line);
    mark_bytes(bar);
    check_destination(to, 8, what, file, line);
    copier_access(WRITER, NULL, to, 8, &bar->tag[bar->phase & 1], __builtin_return_address(0));
    flight x = {to, NULL, value, 8, bar->block != me->self->block, bar, {what, file, line}, {}};
    launch_flight(&x);
}

void simt_fence_proxy_async(void) {
    fiber *f = me->self;
    f->block->fences++;
    publish_barriers(f);
    release(&f->block->fence_tag);
}

/* A store may read its source. */
static void check_source(const char *from, size_t bytes, const char *what, const char *file, int line) {
    group *g = me->group;
    check_landed(from, bytes, what, file, line);
    if (written_since(me->self->block, from, bytes) == UNFENCED)
        fail_all(file, line, "%s: threads wrote to %s and none has executed lk_fence_proxy_async_shared since", what,
                 place_name(g, from));
    if (g->store_count == MAX_STORES)
        simt_fail(file, line, "%s: more than %u bulk stores that nobody has waited for", what, MAX_STORES);
    take_note(me->self->block, from, bytes);
}

void simt_bulk_store(void *global, const void *shared, unsigned bytes, const char *file, int line) {
    const char *what = "lk_cp_async_bulk_store", *from = (const char *)shared;
    fiber *f = me->self;
    group *g = me->group;
    maybe_switch();
    check_bulk(shared, global, bytes, what, file, line);
    check_source(from, bytes, what, file, line);
    void *pc = __builtin_return_address(0);
    copier_access(READER, from, NULL, bytes, &f->read_tag[f->bulk_groups & 3], pc);
    copier_access(FENCED_READER, from, NULL, bytes, &f->read_tag[f->bulk_groups & 3], pc);
    copier_access(WRITER, NULL, global, bytes, &f->write_tag[f->bulk_groups & 3], pc);
    store *x = &g->stores[g->store_count++];
    *x = {(char *)global, from, bytes, f->bulk_groups, 0, hash_of(from, bytes), f, {what, file, line}, {}, 0};
    if (copies == EAGER) land_store(x);
}

/* The box at (x, y) of the matrix that a map describes. */
static tensor_box read_map(const void *map, int x, int y, const char *what, const char *file, int line) {
    const simt_tensor *t = (const simt_tensor *)map;
    group *g = me->group;
    if ((uintptr_t)map % 64) simt_fail(file, line, "%s: the tensor map at %p is not aligned to 64 bytes", what, map);
    if ((size_t)((const char *)map - g->memory) < g->memory_stride * g->block_count)
        simt_fail(file, line, "%s: the tensor map is in shared memory", what);
    if (t->magic != SIMT_TENSOR_MAGIC) simt_fail(file, line, "%s: %p is not a tensor map", what, map);
    if (t->rank != 2) simt_fail(file, line, "%s: a tensor map of rank %u, not 2", what, t->rank);
    if (t->span && t->box[0] * t->element != t->span)
        simt_fail(file, line, "%s: rows of %u bytes in a swizzle of %u, which the engine does not know", what,
                  t->box[0] * t->element, t->span);
    return {t->base, {t->size[0], t->size[1]}, t->stride[0], {x, y}, {t->box[0], t->box[1]}, t->element, t->span};
}

void simt_tensor_prefetch(const void *map, const char *file, int line) {
    read_map(map, 0, 0, "lk_prefetch_tensormap", file, line);
}

static void check_box(const void *shared, const tensor_box *b, const char *what, const char *file, int line) {
    group *g = me->group;
    size_t offset, room;
    const char *low = NULL, *high = NULL;
    if ((uintptr_t)shared % 128) simt_fail(file, line, "%s: the shared address %p is not a multiple of 128", what, shared);
    const char *name = find_variable(g, shared, &offset, &room);
    if (!name || block_of(g, shared) != me->self->block)
        simt_fail(file, line, "%s: %p is not in this block's shared memory", what, shared);
    if (box_bytes(b) > room)
        simt_fail(file, line, "%s: %u bytes from byte %zu of %s, which ends after %zu", what, box_bytes(b), offset, name, room);
    for (unsigned r = 0; r < b->box[1]; r++) {
        int64_t first, last;
        if (!box_row(b, r, &first, &last)) continue;
        const char *row = box_place(b, r, first);
        const void *bad = first_hidden(row, (last - first) * b->element);
        if (bad) simt_fail(file, line, "%s: row %lld of the matrix leaves its allocation", what, (long long)b->at[1] + r);
        if (!low) low = row;
        high = row + (last - first) * b->element;
    }
    if (low) check_global(low, high - low, what, file, line);
}

static void load_box(char *shared, const tensor_box *b, uint64_t *at, block *to, const char *what, const char *file, int line,
                     void *pc) {
    mbarrier *bar = find_barrier(at, to, what, file, line, pc);
    const unsigned bytes = box_bytes(b);
    check_fenced(bar, what, file, line);
    mark_bytes(bar);
    check_destination(shared, bytes, what, file, line);
    forget_notes(to, shared, bytes);
    copier_box(LOADER, b, shared, false, &bar->tag[bar->phase & 1], pc);
    flight x = {shared, NULL, 0, bytes, 0, bar, {what, file, line}, *b};
    launch_flight(&x);
}

void simt_tensor_load(void *shared, const void *map, int x, int y, uint64_t *bar, const char *file, int line) {
    const char *what = "lk_cp_async_bulk_tensor_2d_load";
    maybe_switch();
    const tensor_box b = read_map(map, x, y, what, file, line);
    check_box(shared, &b, what, file, line);
    load_box((char *)shared, &b, bar, me->self->block, what, file, line, __builtin_return_address(0));
}

void simt_tensor_load_multicast(void *shared, const void *map, int x, int y, uint64_t *bar, unsigned mask, const char *file,
                                int line) {
    const char *what = "lk_cp_async_bulk_tensor_2d_load_multicast";
    fiber *f = me->self;
    group *g = me->group;
    maybe_switch();
    const tensor_box b = read_map(map, x, y, what, file, line);
    check_box(shared, &b, what, file, line);
    if (!mask || mask >> g->block_count)
        simt_fail(file, line, "%s: a mask of 0x%x in a cluster of %u blocks", what, mask, g->block_count);
    for (unsigned rank = 0; rank < g->block_count; rank++) {
        if (!(mask >> rank & 1)) continue;
        block *to = &g->blocks[rank];
        const size_t distance = to->memory - f->block->memory;
        if (to != f->block && !f->cluster_waits)
            fail_all(file, line,
                     "%s: shared memory of rank %u used before the first cluster barrier: that block may not have started",
                     what, rank);
        load_box((char *)shared + distance, &b, (uint64_t *)((char *)bar + distance), to, what, file, line,
                 __builtin_return_address(0));
    }
}

static void store_box(const void *map, int at_x, int at_y, const void *shared, int add, const char *what, const char *file,
                      int line, void *pc) {
    fiber *f = me->self;
    group *g = me->group;
    maybe_switch();
    const tensor_box b = read_map(map, at_x, at_y, what, file, line);
    const unsigned bytes = box_bytes(&b);
    const char *from = (const char *)shared;
    if (add && b.element != 4) simt_fail(file, line, "%s: elements of %u bytes; the engine adds floats alone", what, b.element);
    check_box(shared, &b, what, file, line);
    check_source(from, bytes, what, file, line);
    copier_access(READER, from, NULL, bytes, &f->read_tag[f->bulk_groups & 3], pc);
    copier_access(FENCED_READER, from, NULL, bytes, &f->read_tag[f->bulk_groups & 3], pc);
    copier_box(WRITER, &b, NULL, !add, &f->write_tag[f->bulk_groups & 3], pc);
    store *x = &g->stores[g->store_count++];
    *x = {NULL, from, bytes, f->bulk_groups, 0, hash_of(from, bytes), f, {what, file, line}, b, add};
    if (copies == EAGER) land_store(x);
}
void simt_tensor_store(const void *map, int x, int y, const void *shared, const char *file, int line) {
    store_box(map, x, y, shared, 0, "lk_cp_async_bulk_tensor_2d_store", file, line, __builtin_return_address(0));
}
void simt_tensor_add(const void *map, int x, int y, const void *shared, const char *file, int line) {
    store_box(map, x, y, shared, 1, "lk_cp_reduce_async_bulk_tensor_2d_add", file, line, __builtin_return_address(0));
}

char *simt_matrix_row(void *row, const char *file, int line) {
    const char *what = "lk_stmatrix_x4";
    group *g = me->group;
    size_t offset, room;
    if ((uintptr_t)row % 16) simt_fail(file, line, "%s: the row's address %p is not a multiple of 16", what, row);
    if (!find_variable(g, row, &offset, &room) || block_of(g, row) != me->self->block || room < 16)
        simt_fail(file, line, "%s: %p is not in this block's shared memory", what, row);
    return (char *)row;
}

void simt_bulk_commit(void) { me->self->bulk_groups++; }

__attribute__((noinline, cold)) static void bad_own_copy(const void *to, const void *from, size_t bytes, const char *file,
                                                         int line) {
    group *g = me->group;
    size_t offset, room;
    char what[32];
    snprintf(what, sizeof what, "lk_cp_async_%zu", bytes);
    if (bytes != 4 && bytes != 8 && bytes != 16) simt_fail(file, line, "cp.async copies 4, 8 or 16 bytes, not %zu", bytes);
    if ((uintptr_t)to % bytes) simt_fail(file, line, "%s: the shared address %p is not a multiple of %zu", what, to, bytes);
    if ((uintptr_t)from % bytes) simt_fail(file, line, "%s: the global address %p is not a multiple of %zu", what, from, bytes);
    if ((size_t)((const char *)to - me->self->block->memory) >= g->memory_stride)
        simt_fail(file, line, "%s: %p is not in this block's shared memory", what, to);
    const char *name = find_variable(g, to, &offset, &room);
    if (!name || bytes > room) simt_fail(file, line, "%s: %zu bytes at %p are in no shared variable", what, bytes, to);
    check_global(from, bytes, what, file, line);
}

static bool poisoned_prefetch;
void simt_allow_poisoned_prefetch(int allowed) { poisoned_prefetch = allowed; }

void simt_bulk_prefetch(const void *at, unsigned bytes, const char *file, int line) {
    const char *const what = "lk_cp_async_bulk_prefetch_l2";
    if (!bytes || (((uintptr_t)at | bytes) & 15))
        simt_fail(file, line, "%s: %u bytes at %p are not multiples of 16", what, bytes, at);
    if (!poisoned_prefetch) check_global(at, bytes, what, file, line);
}

void simt_prefetch(const void *at, const char *file, int line) {
    if (!poisoned_prefetch && first_hidden(at, 1)) check_global(at, 1, "lk_prefetch_l2", file, line);
}

void simt_cp_async(void *to, const void *from, size_t bytes, const char *file, int line) {
    fiber *f = me->self;
    group *g = me->group;
    // Whether the ranges are in a shared variable and an allocation takes a search: that is left to ASan and the redzones.
    if (__builtin_expect((bytes != 4 && bytes != 8 && bytes != 16) || (((uintptr_t)to | (uintptr_t)from) & (bytes - 1))
                         || (size_t)((char *)to - f->block->memory) >= g->memory_stride
                         || (size_t)((const char *)from - g->memory) < g->memory_stride * g->block_count
                         || first_hidden(to, bytes) || first_hidden(from, bytes), 0))
        bad_own_copy(to, from, bytes, file, line);
    if (__builtin_expect(f->own_count == MAX_OWN_COPIES, 0))
        simt_fail(file, line, "lk_cp_async_%zu: more than %u copies that the thread has not waited for", bytes, MAX_OWN_COPIES);
    touch(from, bytes, false, __builtin_return_address(0));
    touch(to, bytes, true, __builtin_return_address(0));
    own_copy *x = &f->own_copies[f->own_count++];
    *x = {(char *)to, (const char *)from, file, line, f->own_groups, (unsigned short)bytes, 0};
    const uint64_t word = 0x0101010101010101u * (unsigned char)simt_poison_byte(), poison[2] = {word, word};
    if (copies == EAGER) land_own(x);
    else copy_few(x->to, (const char *)poison, x->bytes);
}

void simt_cp_async_commit(const char *, int) { me->self->own_groups++; }

void simt_cp_async_wait(unsigned groups, const char *, int) {
    fiber *f = me->self;
    maybe_switch();
    unsigned kept = 0;
    for (unsigned i = 0; i < f->own_count; i++) {
        own_copy *x = &f->own_copies[i];
        if (x->group + groups >= f->own_groups) {
            if (kept++ != i) f->own_copies[kept - 1] = *x;
            continue;
        }
        touch(x->from, x->bytes, false, __builtin_return_address(0));
        touch(x->to, x->bytes, true, __builtin_return_address(0));
        land_own(x);
    }
    f->own_count = kept;
}

void simt_bulk_wait(unsigned groups, int read, const char *file, int line) {
    fiber *f = me->self;
    group *g = me->group;
    maybe_switch();
    note_site(f, read ? "lk_cp_async_bulk_wait_group_read" : "lk_cp_async_bulk_wait_group", file, line);
    for (unsigned i = 0; i < g->store_count;) {
        store *x = &g->stores[i];
        if (x->by != f || x->group + groups >= f->bulk_groups) {
            i++;
            continue;
        }
        if (hash_of(x->from, x->bytes) != x->hash)
            fail_all(x->site.file, x->site.line, "%s: its source, %s, was written to before the wait at %s:%d", x->site.what,
                     place_name(g, x->from),
                     base_name(file), line);
        land_store(x);
        acquire(&f->read_tag[x->group & 3]);
        *x = g->stores[--g->store_count];
    }
    if (read) return;
    for (unsigned n = 0; n < 4; n++)
        if (n + groups < f->bulk_groups) acquire(&f->write_tag[(f->bulk_groups - groups - 1 - n) & 3]);
}

static void check_copies_of_thread(fiber *f) {
    group *g = f->block->group;
    for (unsigned i = 0; i < g->store_count; i++) {
        const store *x = &g->stores[i];
        if (x->by != f) continue;
        fail_all(x->site.file, x->site.line, "%s: thread %u exits and has not %s", x->site.what, f->index,
                 x->group == f->bulk_groups ? "committed it to a bulk group" : "waited for its bulk group");
    }
    if (!f->own_count) return;
    const own_copy *x = &f->own_copies[0];
    fail_all(x->file, x->line, "lk_cp_async_%u: thread %u exits and has not %s", x->bytes, f->index,
             x->group == f->own_groups ? "committed it to a group" : "waited for its group");
}

static void check_copies_of_block(block *blk) {
    group *g = blk->group;
    for (unsigned i = 0; i < g->barrier_count; i++) {
        const mbarrier *bar = &g->barriers[i];
        if (bar->block != blk) continue;
        if (bar->in_flight)
            fail_all(bar->born.file, bar->born.line,
                     "block rank %u exits while %zu bytes are on their way to it, counted by mbarrier %s", blk->rank,
                     bar->in_flight, place_name(g, bar->at));
        if (bar->bytes)
            fail_all(bar->born.file, bar->born.line, "block rank %u exits in phase %u of mbarrier %s with %d bytes %s",
                     blk->rank, bar->phase, place_name(g, bar->at),
                     abs(bar->bytes), bar->bytes < 0 ? "too many" : "missing");
        if (bar->landed_in > bar->waited_for)
            fail_all(bar->born.file, bar->born.line,
                     "block rank %u exits and nobody has waited for the bytes of phase %d of mbarrier %s", blk->rank,
                     bar->landed_in, place_name(g, bar->at));
    }
}

/* ---- warpgroups -------------------------------------------------------------------------------------------------------------
   A wgmma is a *product*. Its threads need not meet: each leaves its request and goes on, the last of the 128 to come makes the
   engine read the operands and multiply, into a tile that stands for the registers of all; the sums in the threads' own
   variables are poison from the issue on. A thread that waits parks until the product is done: lazily, when nothing else of the
   cluster can run; eagerly, as soon as all have issued it; else at random. By then the operands have to be what they were, and
   from then on, for the first thread past the wait, they may be written over: a wgmma is done for its warpgroup as a whole. */

static warpgroup *find_warpgroup(const fiber *f) {
    return f->block->group->warpgroups[f->block->rank * (1024 / WARPGROUP) + f->index / WARPGROUP];
}

/* The 16 bytes of number `i` of an operand: along K, or along M and N, first. */
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
    block *blk = me->self->block;
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
        const char *variable = find_variable(blk->group, p->atom[i].at, &offset, &room);
        if (!variable || block_of(blk->group, p->atom[i].at) != blk || room < p->atom[i].bytes)
            simt_fail(site->file, site->line, "%s: descriptor %s leads to %zu bytes at %s, past the end of a shared variable",
                      site->what, name, p->atom[i].bytes, place_name(blk->group, p->atom[i].at));
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

typedef float four_floats __attribute__((vector_size(16), aligned(4), may_alias));

/* tile += a b over 16 values of k in their order, or tile = a b; rows of n. */
static void multiply(float *tile, const float *a, const float *b, int n, int accumulate) {
    for (int column = 0; column < n; column += 16)
        for (int row = 0; row < 64; row += 2) {
            four_floats sum[2][4];
            for (int r = 0; r < 2; r++)
                for (int c = 0; c < 4; c++)
                    sum[r][c] = accumulate ? *(const four_floats *)(tile + (row + r) * n + column + 4 * c) : four_floats{};
            for (int k = 0; k < 16; k++) {
                const float *right = b + k * n + column;
                for (int r = 0; r < 2; r++) {
                    const float left = a[(row + r) * 16 + k];
                    for (int c = 0; c < 4; c++) sum[r][c] += left * *(const four_floats *)(right + 4 * c);
                }
            }
            for (int r = 0; r < 2; r++)
                for (int c = 0; c < 4; c++) *(four_floats *)(tile + (row + r) * n + column + 4 * c) = sum[r][c];
        }
}

/* All have issued it: reads and multiplies. The operands may not be on their way, nor lack a proxy fence. */
static void execute(warpgroup *wg, product *p, void *pc) {
    block *blk = me->self->block;
    const wait_site *site = &p->site;
    for (unsigned i = 0; i < p->atoms; i++) {
        check_landed(p->atom[i].at, p->atom[i].bytes, site->what, site->file, site->line);
        const written state = written_since(blk, p->atom[i].at, p->atom[i].bytes);
        if (state == UNFENCED)
            fail_all(site->file, site->line, "%s: threads wrote to %s and none has executed lk_fence_proxy_async_shared since",
                     site->what, place_name(blk->group, p->atom[i].at));
        if (state == FENCED) take_note(blk, p->atom[i].at, p->atom[i].bytes);
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
    // Each warp reads its 16 rows of A and all of B behind its own issue; once more all is read by what only fences order.
    const unsigned slot = (unsigned)(p - wg->products);
    for (unsigned reader = 0; reader < 5; reader++) {
        become_copier(reader < 4 ? READER : FENCED_READER, &wg->issue_tag[slot][reader % 4]);
        for (unsigned i = 0; i < p->chunks; i++) {
            const operand *o = &p->operands[i >= p->chunks_of_a];
            const unsigned number = i < p->chunks_of_a ? i : i - p->chunks_of_a;
            const unsigned row = o->transposed ? number % (o->extent / 8) * 8 : number / 2;
            if (reader < 4 && i < p->chunks_of_a && row / 16 != reader) continue;
            touch(chunk_at(o, number), 16, false, pc);
        }
        end_copier(&wg->done_tag[slot]);
    }
#endif
    (void)pc;
}

/* The products up to number `upto` are done, unless somebody has changed what they read. */
static void finish_up_to(warpgroup *wg, unsigned upto) {
    group *g = wg->threads->block->group;
    for (; wg->done < upto; wg->done++) {
        const product *p = &wg->products[wg->done % MAX_PRODUCTS];
        for (unsigned i = 0; i < p->chunks; i++) {
            const uint64_t *at = i < p->chunks_of_a ? (const uint64_t *)chunk_at(&p->operands[0], i)
                                                    : (const uint64_t *)chunk_at(&p->operands[1], i - p->chunks_of_a);
            if (p->raw[2 * i] == at[0] && p->raw[2 * i + 1] == at[1]) continue;
            fail_all(p->site.file, p->site.line, "%s: its operand, %s, was written to before the wait", p->site.what,
                     place_name(g, at));
            return;
        }
        me->progress++;
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

/* Nothing else can run: the products that some warpgroup waits for, and that all have issued, are done. False if there are
   none. */
static bool finish_products(worker *w, group *g) {
    const unsigned count = g->block_count * (1024 / WARPGROUP);
    const unsigned from = copies == RANDOM_COPIES ? next_of(&w->copy_random) % count : 0;
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
    const char *what = "lk_wgmma_descriptor";
    const size_t offset = (const char *)shared - me->self->block->memory;
    if (offset >= me->group->memory_stride) simt_fail(file, line, "%s: %p is not in this block's shared memory", what, shared);
    if (offset % 16) simt_fail(file, line, "%s: %s is not aligned to 16 bytes", what, place_name(me->group, shared));
    if (offset >> 18) simt_fail(file, line, "%s: %s is beyond 256 KiB", what, place_name(me->group, shared));
    return (unsigned)offset;
}

void simt_wgmma_fence(const char *, int) { me->self->wgmma_fences++; }

/* The element of a thread's i-th sum in a tile of rows of n. */
static unsigned sum_at(unsigned thread, int i, int n) {
    return (thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8) * n + i / 4 * 8 + thread % 4 * 2 + i % 2;
}

static const uint32_t POISON_SUM = 0xffffffffu;         // a NaN

/* The thread's sums d, until now its own, become those of a product. */
static void lend_sums(fiber *f, sums *to, float *d, const product *p) {
    const unsigned t = f->index % WARPGROUP;
    const wait_site *site = &p->site;
    const held_sums *held = NULL;
    for (const held_sums &h : f->held)
        if (h.d == d) held = &h;
    if (!f->wgmma_fences) fail_all(site->file, site->line, "%s: no lk_wgmma_fence before the first wgmma", site->what);
    if (held && held->fences == f->wgmma_fences && (!p->accumulate || hash_of(d, p->n * 2) != held->hash))
        fail_all(site->file, site->line, "%s: thread %u has touched its sums since the wait, and no lk_wgmma_fence follows",
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
            fail_all(file, line,
                     "lk_wgmma_wait_group: thread %u has written to its sums, d[%d], while a wgmma was on its way to them",
                     f->index, i);
        d[i] = from->tile[sum_at(t, i, from->n)];
    }
    from->d[t] = NULL;
    from->holders--;
    unsigned slot = 0;
    while (slot < MAX_HELD && f->held[slot].d != d) slot++;
    if (slot == MAX_HELD) slot = f->held_turn++ % MAX_HELD;
    f->held[slot] = {d, hash_of(d, from->n * 2), f->wgmma_fences};
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
    const char *what = registers ? "lk_wgmma_m64k16_bf16_register" : "lk_wgmma_m64k16_bf16";
    fiber *f = me->self;
    const unsigned t = f->index % WARPGROUP, number = f->products, slot = number % MAX_PRODUCTS;
    accumulate = accumulate != 0;
    maybe_switch();
    if (f->index - t + WARPGROUP > f->block->threads)
        simt_fail(file, line, "%s: the warpgroup of thread %u has only %u threads", what, f->index,
                  f->block->threads - (f->index - t));
    warpgroup **place = &f->block->group->warpgroups[f->block->rank * (1024 / WARPGROUP) + f->index / WARPGROUP];
    if (!*place) {                                      // not by malloc, in which TSan would see the running fiber
        *place = (warpgroup *)mmap(NULL, sizeof **place, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
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
        fail_all(file, line,
                 "divergent wgmma: number %u of its warpgroup is this one for thread %u and the one at %s:%d for others",
                 number, f->index, base_name(p->site.file), p->site.line);
    } else if (p->n != n || p->a != a || p->b != b || p->accumulate != accumulate || p->transpose_a != transpose_a
               || p->transpose_b != transpose_b) {
        fail_all(file, line, "divergent wgmma: thread %u passes %s than others of its warpgroup", f->index,
                 p->a != a || p->b != b ? "other descriptors" : "another shape or accumulate");
    }
    sums *to = p->sums;
    for (sums &x : wg->all_sums)
        if (x.holders && x.d[t] == d && &x != to)
            fail_all(file, line, "divergent wgmma: thread %u passes other sums than others of its warpgroup", f->index);
    if (to->d[t] && (to->d[t] != d || to->n != n))
        fail_all(file, line, "%s: thread %u passes other sums, or sums of another shape, than those on their way", what,
                 f->index);
    if (registers) {
        if (f->wgmma_fences == f->fences_at_wait)
            fail_all(file, line, "%s: no lk_wgmma_fence between the last wait and this use of registers for A", what);
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
    fiber *f = me->self;
    f->product_commits[f->product_groups++ % MAX_COMMITS] = f->products;
}

void simt_wgmma_wait(unsigned groups, const char *file, int line) {
    const char *what = "lk_wgmma_wait_group";
    fiber *f = me->self;
    warpgroup *wg = find_warpgroup(f);
    maybe_switch();
    note_site(f, what, file, line);
    const unsigned committed = f->product_groups ? f->product_commits[(f->product_groups - 1) % MAX_COMMITS] : 0;
    if (!groups && f->products != committed)
        fail_all(file, line, "%s: thread %u has issued %u wgmma that it has not committed to a group", what, f->index,
                 f->products - committed);
    f->fences_at_wait = f->wgmma_fences;
    if (f->product_groups <= groups) return;
    const unsigned needed = f->product_commits[(f->product_groups - groups - 1) % MAX_COMMITS];
    if (needed <= f->products_waited) return;
    if (wg->done < needed) {
        const bool now = copies == EAGER || (copies == RANDOM_COPIES && !(next_of(&me->copy_random) & 3));
        if (now && all_issued(wg, needed)) {
            finish_up_to(wg, needed);
        } else {
            f->products_needed = needed;
            wg->parked++;
            me->group->products_parked++;
            block_fiber(f, IN_WGMMA);
        }
    }
    for (; f->products_waited < needed; f->products_waited++) acquire(&wg->done_tag[f->products_waited % MAX_PRODUCTS]);
    const unsigned t = f->index % WARPGROUP;
    for (sums &x : wg->all_sums)
        if (x.holders && x.d[t] && x.last[t] <= needed) return_sums(f, &x, file, line);
}

static void check_products_of_thread(fiber *f) {
    const warpgroup *wg = find_warpgroup(f);
    const unsigned committed = f->product_groups ? f->product_commits[(f->product_groups - 1) % MAX_COMMITS] : 0;
    const wait_site *site = &wg->products[f->products_waited % MAX_PRODUCTS].site;
    fail_all(site->file, site->line, "%s: thread %u exits and has not %s", site->what, f->index,
             f->products_waited >= committed ? "committed it to a group" : "waited for its group");
}

/* ---- workers -------------------------------------------------------------------------------------------------------------------------------- */

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

/* Every worker has gone round without getting anything done since this progress was reached, so each polled all that the others left: none ever will. */
static bool all_stuck(const launch *l, uint64_t progress) {
    if (l->progress.load() != progress) return false;
    for (unsigned i = 0; i < l->workers; i++) {
        uint64_t at = l->stuck_at[i].load();
        if (at != progress && at != FINISHED) return false;
    }
    return true;
}

/* None of the group can run: says where the first stands that waits for an mbarrier, a wgmma or a named barrier, and what that
   misses. */
static void report_deadlock(group *g) {
    for (unsigned i = 0; i < g->warp_count; i++)
        for (unsigned m = g->warps[i].exist; m; m &= m - 1) {
            const fiber *f = &g->warps[i].lanes[__builtin_ctz(m)];
            const wait_site *site = &f->warp->site[f->lane];
            if (f->state == IN_WGMMA) {
                const product *p = &find_warpgroup(f)->products[(f->products_needed - 1) % MAX_PRODUCTS];
                fail_all(site->file, site->line,
                         "deadlock: %u threads wait for what cannot come, thread %u of block rank %u here for the wgmma at "
                         "%s:%d, which %u of its warpgroup's threads have issued",
                         g->live, f->index, f->block->rank, base_name(p->site.file), p->site.line, p->arrived);
                return;
            }
            if (f->state == IN_NAMED) {
                const named_barrier *n = &f->block->named[f->named];
                fail_all(site->file, site->line,
                         "deadlock: %u threads wait for what cannot come, thread %u of block rank %u here at barrier %d, "
                         "where %u of %u threads are",
                         g->live, f->index, f->block->rank, f->named, n->arrived, n->threads);
                return;
            }
            if (f->state != IN_MBARRIER) continue;
            fail_all(site->file, site->line,
                     "deadlock: %u threads wait for what cannot come, thread %u of block rank %u here for phase %u of %s",
                     g->live, f->index, f->block->rank, f->waits_phase, barrier_text(g, f->waits_for));
            return;
        }
    fail_all("launch", 0, "deadlock: %u threads wait for what cannot come", g->live);
}

/* Runs every resident group until it has nothing ready; retires those that end. */
static void run_round(worker *w) {
    launch *l = w->launch;
    for (size_t i = 0; i < w->resident.size();) {
        group *g = w->resident[i];
        wake_yielded(g);
        run_group(w, g);
        while (!l->failed) {                            // copies first: wgmma are done as late as can be
            const bool other = copies == RANDOM_COPIES && g->products_parked && next_of(&w->copy_random) & 1;
            if (g->flight_count && !(other && finish_products(w, g))) land_one(w, g);
            else if (!g->flight_count && !(g->products_parked && finish_products(w, g))) break;
            if (!l->failed && any_ready(g)) run_group(w, g);
        }
        if (l->failed) return;
        if (!g->live) {
            retire_group(w, g);
            w->resident.erase(w->resident.begin() + i);
            w->idle.push_back(g);
            continue;
        }
        if (!any_ready(g) && !g->yielded) report_deadlock(g);
        i++;
    }
}

static void abandon(worker *w, group *g) {
    for (fiber &f : g->fibers) {
        f.abandoned = 1;
#if defined(SIMT_TSAN)
        if (!f.tsan) continue;
        __tsan_switch_to_fiber(f.tsan, 1);              // in its name: what it did comes before what follows the launch
        release(&w->launch->end_tag);
        __tsan_switch_to_fiber(w->tsan, 1);
#endif
    }
    show(g->memory, g->memory_bytes);
    w->idle.push_back(g);
}

/* One group at a time, from start to end; more only while all that are there do nothing but spin: they may wait for blocks yet to start. */
static void work(worker *w) {
    launch *l = w->launch;
    unsigned rounds = 0;                                // in a row in which no worker got anything done
    uint64_t seen = 0;
    const unsigned patience = 64, give_up = 20000;
    const simt_launch_shape *s = l->shape;
    size_t room = MAX_RESIDENT_THREADS / ((size_t)s->block.x * s->block.y * s->block.z * s->cluster.x * s->cluster.y * s->cluster.z);
    while (!l->failed.load(std::memory_order_relaxed)) {
        uint64_t now = l->progress.load();
        rounds = now == seen ? rounds + 1 : 0;
        seen = now;
        if (w->resident.empty() || (rounds >= patience && w->resident.size() < room)) {
            l->stuck_at[w->index] = NOT_STUCK;          // before it is taken: a group that has yet to run is nobody's deadlock
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
        if (all_stuck(l, now)) fail_all("spin loops", 0, "deadlock: all threads that can run only spin");
        sched_yield();                                  // somebody on another OS thread still works
    }
    l->stuck_at[w->index] = FINISHED;
    for (group *g : w->resident) abandon(w, g);
    w->resident.clear();
    w->progress = 0;
}

/* A host thread that ends leaves its worker to the next one: its fibers are dear, and TSan has few. */
static simt_mutex &spare_mutex = *new simt_mutex();
static worker *spare_workers;
struct worker_return {
    ~worker_return() {
        std::lock_guard<simt_mutex> lock(spare_mutex);
        release(me);
        me->next_spare = spare_workers;
        spare_workers = me;
        me = NULL;
    }
};

static worker *this_worker(void) {
    if (!me) {
        static thread_local worker_return at_exit;
        (void)&at_exit;
        std::lock_guard<simt_mutex> lock(spare_mutex);
        me = spare_workers ? spare_workers : new worker();
        spare_workers = me->next_spare;
        acquire(me);
        me->stack_bottom = NULL;
#if defined(SIMT_TSAN)
        me->tsan = __tsan_get_current_fiber();
#endif
    }
    return me;
}

static void work_on(launch *l, unsigned index) {
    worker *w = this_worker();
    w->launch = l;
    w->index = index;
    work(w);
    w->launch = NULL;
    w->group = NULL;
}

/* Helpers live until the process ends and wait for the next launch; never destroyed, or exit would wait for them. */
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
    count = 1;                                          // TSan would see one OS thread's blocks race with the engine's own hand-over
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

int simt_run(const simt_launch_shape *shape, const std::function<void()> &body) {
    static simt_mutex one_launch;
    std::lock_guard<simt_mutex> lock(one_launch);
    if (!schedule_known) simt_set_schedule(NULL);
    choose_copies();
    launch l;
    l.shape = shape;
    l.body = &body;
    unsigned long long blocks = (unsigned long long)shape->grid.x * shape->grid.y * shape->grid.z;
    l.groups = blocks / (shape->cluster.x * shape->cluster.y * shape->cluster.z);
    l.seed = schedule_seed * 1000003 + launch_count++;
    if (schedule == RANDOM) {
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

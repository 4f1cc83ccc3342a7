// SPDX-License-Identifier: MIT
/*
What the files of the engine share; no other file includes this. README.md says which file simulates what.

A launch is a grid of *groups*. A group is a cluster, or a single block where there are no clusters: all its threads are alive
at once. An OS thread that runs groups has a *worker*. Each CUDA thread of a running group is a *fiber*.

The engine is compiled without sanitizers, so nothing checks what it does to the kernel's memory. It calls neither memcpy nor
memset inside a launch: libtsan would record them as accesses of the running fiber.

A function or variable of the engine that more than one file uses begins with simt_, like those of simt.h. A name without it is
of its own file, or a type or an inline function of this one.
*/
#ifndef SIMT_ENGINE_H
#define SIMT_ENGINE_H

#include "cuda_runtime.h"

#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <functional>
#include <string>
#include <vector>

// For loops over the kernel's memory. Without it the compiler makes calls of memcpy and memset from them.
#if defined(__clang__)
#define PLAIN_LOOP __attribute__((noinline, no_builtin))
#else
#define PLAIN_LOOP __attribute__((noinline, optimize("no-tree-loop-distribute-patterns")))
#endif

/* ---- the sanitizers -----------------------------------------------------------------------------------------------------
   ASan: hide() marks memory that nobody may touch, show() takes the mark away.
   TSan: release() and acquire() order two fibers by a tag, any address in the engine; touch() is an access that the running
   fiber makes at `pc` of the kernel. In other builds they do nothing. */

#if defined(SIMT_ASAN)
extern "C" void __sanitizer_start_switch_fiber(void **fake_stack, const void *bottom, size_t bytes);
extern "C" void __sanitizer_finish_switch_fiber(void *fake_stack, const void **old_bottom, size_t *old_bytes);
extern "C" void __asan_poison_memory_region(const volatile void *at, size_t bytes);
extern "C" void __asan_unpoison_memory_region(const volatile void *at, size_t bytes);
extern "C" void *__asan_region_is_poisoned(void *at, size_t bytes);
static inline void hide(void *at, size_t bytes) { __asan_poison_memory_region(at, bytes); }
static inline void show(void *at, size_t bytes) { __asan_unpoison_memory_region(at, bytes); }
static inline const void *first_hidden(const void *at, size_t bytes) { return __asan_region_is_poisoned((void *)at, bytes); }
#else
static inline void hide(void *, size_t) {}
static inline void show(void *, size_t) {}
static inline const void *first_hidden(const void *, size_t) { return NULL; }
#endif

#if defined(SIMT_TSAN)
extern "C" void *__tsan_get_current_fiber(void);
extern "C" void *__tsan_create_fiber(unsigned flags);
extern "C" void __tsan_destroy_fiber(void *fiber);
extern "C" void __tsan_switch_to_fiber(void *fiber, unsigned flags);
extern "C" void __tsan_acquire(void *at);
extern "C" void __tsan_release(void *at);
extern "C" void __tsan_read_range(void *at, unsigned long bytes);
extern "C" void __tsan_write_range(void *at, unsigned long bytes);
extern "C" void __tsan_func_entry(void *pc);
extern "C" void __tsan_func_exit(void);
extern "C" void AnnotateIgnoreReadsBegin(const char *file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char *file, int line);
extern "C" void AnnotateIgnoreWritesBegin(const char *file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char *file, int line);
static inline void acquire(void *at) { __tsan_acquire(at); }
static inline void release(void *at) { __tsan_release(at); }
static inline void touch(const void *at, size_t bytes, bool write, void *pc) {
    __tsan_func_entry(pc);
    write ? __tsan_write_range((void *)at, bytes) : __tsan_read_range((void *)at, bytes);
    __tsan_func_exit();
}
enum { MAX_RESIDENT_THREADS = 4096, MOST_TSAN_FIBERS = 6500 };     // libtsan stops near 8000, where memory mappings run out
#else
static inline void acquire(void *) {}
static inline void release(void *) {}
static inline void touch(const void *, size_t, bool, void *) {}
enum { MAX_RESIDENT_THREADS = 16384 };      // two mappings each, below vm.max_map_count
#endif

/* ---- limits ---------------------------------------------------------------------------------------------------------- */

enum {
    MAX_BLOCKS = 16,                    // of a cluster
    MAX_WARPS = MAX_BLOCKS * 32,
    STACK_BYTES = 256 << 10,            // of address space; only what is touched costs memory
    STATIC_BYTES = 48 << 10,            // CUDA's limit for static shared memory
    REDZONE = 32,                       // bytes after each shared variable
    MAX_VARIABLES = 256,
    STATIC_AREA = STATIC_BYTES + MAX_VARIABLES * (REDZONE + 16),
    REDZONE_BYTE = 0xCB,
    MAX_TAGS = 8,
    MAX_WORKERS = 64,
    MAX_BARRIERS = 64,                  // mbarriers of a block
    MAX_ARRIVALS = (1 << 20) - 1,       // in a phase of an mbarrier; its bytes may be as far from 0 on both sides
    MAX_COPIES = 4096,                  // of a group in flight; one more makes the oldest land. A power of two
    MAX_STORES = 1024,                  // bulk stores of a group that no thread has waited for
    MAX_OWN_COPIES = 128,               // cp.async of a thread that it has not waited for
    MAX_NOTES = 64,                     // ranges of a block's shared memory that copies have written or read
    COPIERS = 4,                        // TSan fibers, in turn, for one kind of access
    WARPGROUP = 128,                    // threads
    MAX_WARPGROUPS = 1024 / WARPGROUP,  // of a block
    MAX_COMMITS = 8,                    // groups of wgmma whose ends a thread remembers
    MAX_HELD = 4,                       // arrays of sums that a thread remembers to have received
    NAMED_BARRIERS = 16,
};

/* ---- what a group consists of ---------------------------------------------------------------------------------------- */

struct group;
struct block;
struct warp;
struct warpgroup;                       // warpgroups.cpp

struct wait_site {                      // where a thread waits: the operation and the caller's line
    const char *what, *file;
    int line;
};

enum fiber_state { READY, IN_WARP, IN_BLOCK, IN_CLUSTER, IN_MBARRIER, IN_NAMED, IN_WGMMA, YIELDED, EXITED };

/* An mbarrier. The 64 bits in the kernel's memory hold only a magic number and the index of this struct. An ordinary store
   destroys them, and the next use reports it. */
struct mbarrier {
    uint64_t *at;
    struct block *block;
    unsigned count, pending, phase;     // phase: how many have ended
    int bytes;                          // announced in this phase, less those landed
    size_t in_flight;                   // bytes of copies that are issued and have not landed
    unsigned parked, waking;            // threads that wait for this phase; that waited for the last and have not run since
    unsigned initialiser, fenced;       // the thread, and whether it has published the init
    int counts_bytes;                   // bytes have been announced, or copies issued, for some phase
    int landed_in, waited_for;          // the last phases that bytes landed in and that a thread waited for; -1 at first
    int from_peers[2];                  // per parity: another block arrived or stored in this phase
    wait_site born, passed;             // of the init; of the first wait for parity 1 before the first phase
    char tag[2];
};

struct tensor_box {                     // what a tensor copy moves
    char *base;
    int64_t size[2], stride;
    int at[2];
    unsigned box[2], element, span;     // element: bytes of one, 0 for what is not a tensor copy
};

struct flight {                         // a bulk load, tensor load or st.async that has not landed
    char *to;
    const char *from;                   // NULL: the 8 bytes of `value`
    uint64_t value;
    unsigned bytes, peer;               // peer: issued by another block than the one that it goes to
    mbarrier *bar;
    wait_site site;
    tensor_box box;
};

struct store {                          // a bulk or tensor store, from its issue to the wait for it
    char *to;
    const char *from;
    unsigned bytes, group, landed;      // group: the bulk group of its thread
    uint64_t hash;                      // of the source at the issue
    struct fiber *by;
    wait_site site;
    tensor_box box;
    int add;
};

struct own_copy {                       // a cp.async, from its issue to its thread's wait for it
    char *to;
    const char *from, *file;
    int line;
    unsigned group;                     // of its thread
    unsigned short bytes, landed;
};

struct range_note {                     // shared memory as a copy left it or read it
    const char *from, *to;
    uint64_t hash;
    unsigned fences;                    // that the block had executed by then
};

struct held_sums {                      // sums of a wgmma as a thread has received them
    const float *d;
    uint64_t hash;
    unsigned fences;                    // that the thread had executed by then
};

struct named_barrier {
    unsigned threads, arrived, generation;
    wait_site site;                     // of the first that arrived
    char tag[2];
};

struct fiber {                          // a thread of the kernel
    simt_coordinates here;              // first: simt_here points at it
    void *sp;                           // the saved stack pointer while it does not run
    struct block *block;
    struct warp *warp;
    unsigned lane, index;               // index: of the thread in its block
    fiber_state state;
    unsigned cluster_arrivals, cluster_waits;
    unsigned inits_fenced;              // a fence.mbarrier_init since the last arrival at a cluster barrier
    mbarrier *waits_for;                // while IN_MBARRIER
    unsigned waits_phase;
    int named;                          // while IN_NAMED: the number of the barrier
    // copies: groups committed so far, and the cp.async that it has not waited for
    unsigned bulk_groups, own_groups, own_count;
    own_copy *own_copies;
    // wgmma: issued so far; groups committed; the number issued at each commit; done as far as the thread has waited
    unsigned products, product_groups, product_commits[MAX_COMMITS], products_waited;
    unsigned products_needed;           // while IN_WGMMA
    unsigned wgmma_fences, fences_at_wait, held_turn;
    held_sums held[MAX_HELD];
    char issue_tag, read_tag[4], write_tag[4];  // of its copies; the last two by bulk group
    char *stack;
    void *fake_stack, *tsan;
    int abandoned, abandonments;        // the last launch left it in the middle of a kernel; how many have
};

struct sync_tag {                       // what TSan orders __syncwarp by: a pair per mask in use
    unsigned mask, generation;
    char at[2];
};

struct warp {
    unsigned exist, ready, waiting, yielded, exited;    // a bit per lane; waiting: in a warp operation
    unsigned index;                                     // in the group
    fiber *lanes;
    struct block *block;
    // the request of each waiting lane
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
    char *memory;                       // its shared memory: the dynamic area, then the static area
    unsigned cluster_waited;            // cluster barriers that some thread of this block has waited for
    // per peer: 1 + the cluster barriers that its threads had arrived at when they last asked for our memory
    unsigned mapped_after[MAX_BLOCKS];
    unsigned fences, note_count, notes_lost;    // fences: fence.proxy.async executed so far
    range_note notes[MAX_NOTES];
    named_barrier named[NAMED_BARRIERS];
    char tag[2], fence_tag;
    void *copiers[4][COPIERS];          // TSan fibers: by copier
    unsigned copier_turn;
};

struct shared_slot {                    // a static shared variable of the kernel
    const simt_variable *variable;
    size_t offset;
};

struct group {
    uint64_t ready_warps[MAX_WARPS / 64];
    unsigned block_count, warp_count, live, yielded;
    unsigned current_warp;
    unsigned cluster_arrived, cluster_phase, cluster_left;  // left: have arrived in this phase and exited without a wait
    wait_site cluster_site;
    unsigned long long ordinal;         // position in the order of the grid
    std::vector<fiber> fibers;
    std::vector<warp> warps;
    std::vector<block> blocks;
    char *memory;                       // shared memory of all blocks, memory_stride bytes each
    size_t memory_stride, memory_bytes;
    std::vector<shared_slot> shared;
    size_t static_used, static_bytes;
    char cluster_tag[2];
    unsigned barrier_count, first_flight, flight_count, store_count;
    mbarrier *barriers;
    // per mbarrier and thread of its block: the last phase waited for; -1: the one before the first; -2: none
    int *last_waited;
    size_t last_waited_room;
    flight *flights;                    // a ring
    store *stores;
    own_copy *own_copies;               // MAX_OWN_COPIES per thread
    size_t own_copies_room;
    warpgroup *warpgroups[MAX_BLOCKS * MAX_WARPGROUPS];     // NULL until one of its threads issues a wgmma
    unsigned products_parked;           // threads that wait for wgmma
};

/* ---- a launch -------------------------------------------------------------------------------------------------------- */

struct launch {
    const simt_launch_shape *shape;
    const std::function<void()> *body;
    unsigned long long groups;
    std::vector<unsigned long long> shuffled;
    std::atomic<unsigned long long> next{0};
    std::atomic<int> failed{0};
    unsigned workers;
    std::atomic<uint64_t> progress{0};  // increases with everything that any worker gets done
    std::atomic<uint64_t> stuck_at[MAX_WORKERS];    // per worker: the progress at the start of its last round without any
    uint64_t seed;
    char start_tag, end_tag;
};

struct worker {                         // one per OS thread
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
    // For messages. Not thread-local: a library that a program loads while it runs has little room for thread-local data.
    char barrier_text[512], place_names[4][128];
    unsigned places;
};

enum order { FORWARD, REVERSE, RANDOM };
enum copy_order { LAZY, EAGER, RANDOM_COPIES };

// A shared library does not export what is declared from here on.
#pragma GCC visibility push(hidden)

extern order simt_schedule;
extern copy_order simt_copies;          // of this launch
extern __thread worker *simt_me __attribute__((tls_model("initial-exec")));     // the worker that this OS thread is

/* ---- small functions ------------------------------------------------------------------------------------------------- */

static inline size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }
static inline bool overlap(const char *a, size_t a_bytes, const char *b, size_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
}
static inline bool same_file(const char *a, const char *b) { return a == b || !strcmp(a, b); }
static inline const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}
static inline uint64_t random_number(uint64_t *state) {     // splitmix64
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline size_t dynamic_area(const launch *l) { return round_up(l->shape->dynamic_bytes, 16) + REDZONE; }
/* Whether `at` is in the shared memory of the group, and of which block. */
static inline bool in_shared(const group *g, const void *at) {
    return (size_t)((const char *)at - g->memory) < g->memory_stride * g->block_count;
}
static inline block *block_of(group *g, const void *at) {
    return &g->blocks[((const char *)at - g->memory) / g->memory_stride];
}

static inline void set_ready(group *g, warp *wp, unsigned lanes) {
    wp->ready |= lanes;
    g->ready_warps[wp->index / 64] |= 1ull << (wp->index % 64);
    for (unsigned m = lanes; m; m &= m - 1) wp->lanes[__builtin_ctz(m)].state = READY;
}
static inline void clear_ready(group *g, warp *wp, unsigned lanes) {
    wp->ready &= ~lanes;
    if (!wp->ready) g->ready_warps[wp->index / 64] &= ~(1ull << (wp->index % 64));
}
static inline void note_site(fiber *f, const char *what, const char *file, int line) {
    f->warp->site[f->lane] = {what, file, line};
}

/* ---- reports.cpp ----------------------------------------------------------------------------------------------------- */

/* Like simt_fail, and the report also says where all threads of the group are. */
void simt_fail_all(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Texts for messages. They are kept in the worker: a fiber that fails is abandoned with all that is on its stack, so no
   std::string may be there. */
const char *simt_barrier_text(const group *g, const mbarrier *bar);
const char *simt_place_name(const group *g, const void *at);
/* No thread of the group can run. */
void simt_report_deadlock(group *g);

/* ---- fibers.cpp ------------------------------------------------------------------------------------------------------ */

/* The next ready fiber runs; that may be the running one itself. */
void simt_reschedule(void);
/* The running fiber waits until another sets it ready. */
void simt_block_fiber(fiber *f, fiber_state state);
/* The running fiber never runs again: its launch has failed. */
void simt_leave_fiber(void) __attribute__((noreturn));
void simt_fill(void *at, int byte, size_t bytes);
/* Where a random schedule may switch to another fiber. */
static inline void maybe_switch(void) {
    if (simt_schedule == RANDOM) simt_reschedule();
}

/* ---- warps.cpp ------------------------------------------------------------------------------------------------------- */

/* The name of the variable that `at` lies in, in any block of the group, or NULL. *room: how many bytes of it follow. */
const char *simt_find_variable(const group *g, const void *at, size_t *offset, size_t *room);
/* The pointer for a shared::cluster address. */
char *simt_cluster_pointer(unsigned address, const char *what, const char *file, int line);

/* ---- copies.cpp ------------------------------------------------------------------------------------------------------ */

void simt_prepare_copies(group *g, unsigned threads);
void simt_check_copies_of_thread(fiber *f);
void simt_check_copies_of_block(block *blk);
/* One flight lands: the oldest, or any one where copies are in random order. */
void simt_land_one(worker *w, group *g);
/* Perhaps one copy lands, or some wgmma are done. */
void simt_land_at_random(worker *w, group *g);

/* The mbarrier at `at`, in shared memory of block `blk`, or of any block where `blk` is NULL. */
mbarrier *simt_find_barrier(const uint64_t *at, const block *blk, const char *what, const char *file, int line, void *pc);
void simt_check_fenced(const mbarrier *bar, const char *what, const char *file, int line);
/* The mbarrier counts bytes. */
void simt_mark_bytes(mbarrier *bar);

void simt_check_global(const void *at, size_t bytes, const char *what, const char *file, int line);
/* A copy to `to`: no other copy may be in flight there, no store or wgmma may still read it. */
void simt_check_destination(const char *to, size_t bytes, const char *what, const char *file, int line);
/* What a store or wgmma reads at `from` must have landed. */
void simt_check_landed(const char *from, size_t bytes, const char *what, const char *file, int line);
/* The same for the source of a store, which also needs a proxy fence after the writes, and room in the table of stores. */
void simt_check_source(const char *from, size_t bytes, const char *what, const char *file, int line);
void simt_launch_flight(const flight *x);
void simt_add_store(const store *x);

/* Notes of what copies wrote or read in shared memory, for written_since. */
void simt_forget_notes(block *blk, const char *at, size_t bytes);
void simt_take_note(block *blk, const char *at, size_t bytes);
enum written { UNWRITTEN, FENCED, UNFENCED };
/* Whether threads wrote part of the range since the last copy there, and whether a fence followed. TSan judges which thread
   executed the fence, and when. */
written simt_written_since(const block *blk, const char *at, size_t bytes);
uint64_t simt_hash(const void *at, size_t bytes);

/* TSan sees a copy as a thread of its own. The running fiber becomes that copier, makes its accesses, and ends it. */
enum copier { LOADER, READER, WRITER, FENCED_READER };
#if defined(SIMT_TSAN)
void simt_become_copier(copier who, char *issue);
void simt_end_copier(char *done);
#endif
void simt_copier_access(copier who, const void *read, const void *write, size_t bytes, char *done, void *pc);

/* ---- tensor_maps.cpp ------------------------------------------------------------------------------------------------- */

enum box_motion { BOX_IN, BOX_OUT, BOX_ADD };
/* Moves the box between global memory and shared memory at `at`. */
void simt_move_box(const tensor_box *b, char *at, box_motion motion);
/* Where the 16 bytes at an address of shared memory are in a swizzle of `span` bytes. */
static inline char *swizzled(const char *at, unsigned span) {
    const uintptr_t mask = span / 16 - (span > 0);
    return (char *)at + (((uintptr_t)at ^ ((uintptr_t)at >> 7 & mask) << 4) - (uintptr_t)at);
}

/* ---- warpgroups.cpp -------------------------------------------------------------------------------------------------- */

void simt_prepare_products(group *g);
void simt_check_products_of_thread(fiber *f);
/* The wgmma that some warpgroup waits for, and that all its threads have issued, are done. False if there are none. */
bool simt_finish_products(worker *w, group *g);
/* A copy to `to` must not overwrite an operand of a wgmma that is not done. */
void simt_check_operands(const char *to, size_t bytes, const char *what, const char *file, int line);
/* Reports the deadlock of a thread that waits for a wgmma. */
void simt_report_wgmma_deadlock(const fiber *f);

#pragma GCC visibility pop
#endif

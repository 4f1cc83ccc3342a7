// SPDX-License-Identifier: MIT
/*
simt: CUDA kernels on the CPU.

The .cuh and .cu files of this project compile with plain g++ -std=c++17 -DLK_SIMT -Itests/simt against the stand-in headers in this folder
(named as CUDA's) and run here block by block. This file is the interface between those headers and the engine; kernels do not call it, except for
the wrappers in lk_ptx.cuh, whose asm bodies have an engine body beside them.

How it works
    Every CUDA thread of a block is a fiber: a stack of its own, switched by hand in a few nanoseconds. All blocks of a cluster are alive at
    once on one OS thread; independent clusters are spread over several OS threads. A thread runs until it meets a primitive that has to wait for others
    (a barrier, a warp operation, a spin loop's yield), then the schedule picks the next ready one. A warp operation is one primitive: each lane leaves its
    value and its request, the last lane to come computes everybody's result.

What it reports (stderr, simt_last_report(), and cudaErrorLaunchFailure from the launch)
    Divergent barriers (two lines met by one block, a thread that has exited or waits elsewhere), lanes missing from a warp
    operation, masks without the caller or with lanes that have exited or never existed, shuffles from a lane outside the
    mask, deadlocks with block, threads, file and line of all who wait, misaligned vector accesses through __ldg and its
    sisters, writes just past a shared variable, a peer block's shared memory used before the first cluster barrier or not
    ordered before the peer's exit, a cub TempStorage reused without a barrier. Shared memory and cudaMalloc are filled with
    0xFF bytes (NaN, -1), so what was never written shows in results. ASan and UBSan add every out-of-bounds access to the
    byte, misaligned vectors and leaks; TSan is the race detector: barriers, __syncwarp and cluster barriers order accesses,
    shuffles do not.

mbarriers, bulk copies, st.async and cp.async
    A wait parks its thread until the phase ends; lk_mbarrier_try_wait_parity yields. A load or st.async is in flight until
    it lands: lazy copies land when nothing else of the cluster can run, oldest first; eager ones where they are issued;
    random ones now and then, any of them. What a copy in flight will overwrite is poison from its issue on, so that whoever
    reads a slot that was given back too early, or before the wait, sees NaN. A bulk store reads and writes when its thread
    waits for it, or earlier where copies are eager or random. So does a cp.async, whose destination is poison until then.
    Reported: addresses and sizes that are not multiples of 16 (8 for st.async); ranges that leave a shared variable or an
    allocation, to the byte; an mbarrier that is not initialised, is written over, is initialised twice, or is used by
    copies or peers with no lk_fence_mbarrier_init after its init; an arrival too many; a byte count out of range; a phase
    that ends with copies still on their way to it (too few bytes announced), or again before those who wait for the last
    one have run; a parity that returns at once for a phase the thread has waited for, or before the first phase of a
    barrier that counts bytes; a wait at block scope where peers arrived; a copy into a slot that another copy is filling or
    that a bulk store has yet to read; the source of a bulk store in flight, or changed before the wait, or written with no
    lk_fence_proxy_async_shared by any thread since the last copy there; a thread that exits with stores not waited for; a
    block that exits with copies on their way to it, bytes missing or too many, or bytes nobody waited for; a peer not
    started or gone; a cp.async that is misaligned, of another size than 4, 8 and 16 bytes, to elsewhere than the block's
    shared memory, from there, or never committed or waited for (ranges that leave a variable or an allocation: in ASan's
    build alone). A deadlock names the barriers, with the arrivals and bytes that they miss.
    TSan sees arrivals and waits, and each copy as a thread of its own between its issue and the phase's end or the wait for
    its group: it finds a slot reused or read too early under any schedule, a proxy fence that one of the writers lacks, and
    an init with no barrier before its use. A cp.async is its own thread's: another that reads what it brings, or writes what
    it reads, with no barrier after the wait is a race.
    Not seen: fences between reads or writes and a copy over them, two cp.async of one thread to one place, wrong counts
    that come out even, L2 policies, and whether one warp's arrivals stand in for another's (TSan sees the race that this
    leads to).

Tensor copies, wgmma, stmatrix and named barriers
    cudaGetDriverEntryPointByVersion finds cuTensorMapEncodeTiled, which refuses what CUDA's documentation forbids, and as not
    supported what the engine does not know: types other than f16, bf16 and f32, interleaved and im2col layouts, steps other
    than 1, fills other than zeros, more than three dimensions. The copies move boxes of two dimensions, with rows as long as
    the swizzle where there is one. A tensor copy is a bulk copy in all that is said above; a multicast is one in each block.
    wgmma multiplies bf16, with operands in a swizzle of 128 bytes, K- or MN-major, or A in registers; products are added in
    float in the order of k, so that a plain loop gives the same bits. Its threads need not meet: the last of the 128 to issue
    one makes the engine read the operands and multiply. Sums are NaN from the issue to the wait that returns them. A wgmma is
    done when the first thread of its warpgroup passes the wait for its group: lazily, when nothing else of the cluster can
    run; eagerly, once all have issued it; else at random. Operands have to be the same from the issue until then.
    Reported, besides what is reported of bulk copies: a map that is none, misaligned, in shared memory or of another rank; a
    shared address that is not a multiple of 128; a multicast to a block that is not in the cluster, has not started or is
    gone; a descriptor that does not start where the swizzle's pattern does, or leads out of a shared variable; operands still
    being filled, or written by threads with no lk_fence_proxy_async_shared since; operands written to, or copied over, before
    the wait; threads of a warpgroup that issue different wgmma, and a deadlock where some issue none; a warpgroup that is not
    whole; no lk_wgmma_fence before the first wgmma, after sums have changed or begin anew, or between a wait and A in
    registers; sums written before the wait; a group not committed or not waited for; more than 64 wgmma not waited for; a
    named barrier outside 1 to 15, for other than whole warps or for different counts, or met by half a warp.
    TSan sees a wgmma as five readers between its issue and the wait: each warp's, behind that warp's issue, and one ordered by
    nothing but fences and landings. Additions to global memory meet one another without a race.
    Not seen: sums read between a wait and the next wgmma with no lk_wgmma_fence; registers of A changed before the wait; a
    missing lk_wgmma_hold; whether setmaxnreg finds registers, and whether whole warpgroups execute it; shared memory that
    begins, on a GPU, at no multiple of 1024.

What it does not model
    Programmatic dependent launch, memory fences (a missing one goes unseen; atomics order as acquire-release; two are
    looked for, see above), how tensor cores round, approximate-math bits, concurrency of streams, register limits,
    static shared memory before the kernel runs, speed. Warps do not run in lockstep, and no schedule finds every bug: run
    forward, reverse, and random.

Environment
    SIMT_SCHEDULE=forward|reverse|random:SEED   order of threads and of blocks (forward)
    SIMT_COPIES=lazy|eager|random:SEED          order of asynchronous copies (lazy forward, eager in reverse, else random)
    SIMT_THREADS=N                              OS threads (one per core; always 1 under TSan)
    SIMT_POISON=0xFF                            the byte that fresh memory is filled with; any other than 0xFF guards against fmaxf(NaN, x) = x
    SIMT_SMS=4                                  multiprocessors that the device claims to have
    SIMT_SMEM=228                               KiB of shared memory that each of them claims to have
    SIMT_CODE=90                                the compute capability that kernels claim to be compiled for
    SIMT_DEVICES=1                              devices, 8 at most. Those with odd numbers are older: compute capability 8.0,
                                                no clusters, 3 more multiprocessors, of 100 KiB

Stepping through a kernel
    g++ -std=c++17 -O0 -g -DLK_SIMT -Itests/simt ..., then
        SIMT_THREADS=1 gdb ./program
        (gdb) break my_kernel if simt_here->thread_idx.x == 5 && simt_here->block_idx.x == 2
        (gdb) run
    `next` stays with the thread until it waits in a primitive and is back with it when the primitive is complete, as long as the breakpoint's condition
    holds for it alone; `print *simt_here` tells who runs; `backtrace` ends at the kernel's caller in the engine. Under SIMT_SCHEDULE=forward
    thread 0 runs up to its first wait before thread 1 starts.

Building
    engine.cpp and runtime.cpp are compiled once and never with -fsanitize; -DSIMT_ASAN or -DSIMT_TSAN makes the engine tell that sanitizer about its
    fibers. The program is compiled and linked with the sanitizer.
*/
#ifndef SIMT_H
#define SIMT_H

#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <functional>
#include <mutex>

#include "vector_types.h"

/* ---- for programs and tests ---------------------------------------------------------------------------------------------------------- */

const char *simt_last_report(void);                 /* text of the last error report, "" if there was none */
void simt_clear_report(void);
void simt_quiet(int quiet);                         /* 1: reports are kept for simt_last_report but not printed */
void simt_set_schedule(const char *schedule);       /* "forward", "reverse", "random:SEED"; NULL: what the environment says */
void simt_set_copies(const char *copies);      /* "lazy", "eager", "random:SEED"; NULL: the environment, else by schedule */

/* ---- where the running thread is ------------------------------------------------------------------------------------------------------ */

struct simt_coordinates {
    uint3 thread_idx, block_idx;
    dim3 block_dim, grid_dim;
};

/* initial-exec: one load off the thread register; the engine and the kernels are always in the executable itself */
extern __thread const simt_coordinates *simt_here __attribute__((tls_model("initial-exec")));

unsigned simt_lane(void);                           /* 0..31 */

/* ---- collectives: all take the caller's file and line for the reports ------------------------------------------------------------------ */

#define SIMT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

enum simt_warp_operation {
    SIMT_SYNCWARP, SIMT_SHFL, SIMT_ALL, SIMT_ANY, SIMT_BALLOT, SIMT_MATCH_ANY, SIMT_GATHER,
    SIMT_ADD, SIMT_MIN_U32, SIMT_MAX_U32, SIMT_MIN_S32, SIMT_MAX_S32, SIMT_AND, SIMT_OR, SIMT_XOR,
};

/* value: this lane's contribution. argument: the source lane of SIMT_SHFL. Returns this lane's result. */
uint64_t simt_warp(simt_warp_operation operation, unsigned mask, uint64_t value, unsigned argument, const char *file, int line);

/* Copies the `bytes` bytes at `mine` of every lane of the mask to all[lane * bytes], for lanes whose `all` is not NULL. */
void simt_warp_gather(unsigned mask, const void *mine, void *all, size_t bytes, const char *file, int line);

/* __syncthreads; returns how many threads of the block passed a nonzero predicate. */
int simt_block_barrier(int predicate, const char *file, int line);
/* Block and cluster barriers that the block has passed: tells whether one lies between two points of a kernel. */
unsigned simt_barriers_passed(void);

unsigned simt_cluster_ctarank(void);
unsigned simt_cluster_nctarank(void);
void simt_cluster_arrive(SIMT_SITE);
void simt_cluster_arrive_relaxed(SIMT_SITE);    /* publishes nothing but the mbarriers behind lk_fence_mbarrier_init */
void simt_cluster_wait(SIMT_SITE);
/* The address in the peer block `rank` of the cluster of what is at `smem` in this block. Ask after the first cluster barrier, in the
   stretch between two barriers in which the address is used: the engine takes the call for the access. */
void *simt_cluster_map(const void *smem, unsigned rank, SIMT_SITE);

/* ---- mbarriers and asynchronous copies: what the wrappers of lk_ptx.cuh stand for -------------------------------------- */

/* A shared::cluster address: of what is at `smem` in this block, in block `rank`. The engine does not take this call for the
   access, unlike simt_cluster_map. */
unsigned simt_cluster_address(const void *smem, unsigned rank, SIMT_SITE);

void simt_mbarrier_init(uint64_t *bar, unsigned count, SIMT_SITE);
void simt_fence_mbarrier_init(void);
/* Announces the bytes, then arrives 0 times or once. */
void simt_mbarrier_arrive(uint64_t *bar, unsigned arrivals, unsigned bytes, SIMT_SITE);
void simt_mbarrier_arrive_remote(unsigned bar, SIMT_SITE);
bool simt_mbarrier_try_wait(uint64_t *bar, unsigned parity, int cluster_scope, SIMT_SITE);  /* yields before it returns false */
void simt_mbarrier_wait(uint64_t *bar, unsigned parity, int cluster_scope, SIMT_SITE);

void simt_bulk_load(void *shared, const void *global, unsigned bytes, uint64_t *bar, SIMT_SITE);
void simt_bulk_store(void *global, const void *shared, unsigned bytes, SIMT_SITE);
void simt_bulk_commit(void);
void simt_bulk_wait(unsigned groups, int read, SIMT_SITE);      /* all but the latest `groups`; read: for their sources alone */
void simt_bulk_prefetch(const void *global, unsigned bytes, SIMT_SITE);
void simt_prefetch(const void *global, SIMT_SITE);
/* A prefetch reads nothing. Under ASan what it asks for must be there all the same, poisoned bytes aside while `allowed`: a test
   poisons what is there and is not to be read. */
void simt_allow_poisoned_prefetch(int allowed);
void simt_fence_proxy_async(void);
void simt_st_async(unsigned to, uint64_t value, unsigned bar, SIMT_SITE);
/* cp.async: a thread's own copies, of 4, 8 or 16 bytes, in groups of their own. */
void simt_cp_async(void *to, const void *from, size_t bytes, SIMT_SITE);
void simt_cp_async_commit(SIMT_SITE);
void simt_cp_async_wait(unsigned groups, SIMT_SITE); /* all but the latest `groups` groups have landed */

/* ---- tensor copies, warpgroups, named barriers --------------------------------------------------------------------------- */

void simt_tensor_prefetch(const void *map, SIMT_SITE);
void simt_tensor_load(void *shared, const void *map, int x, int y, uint64_t *bar, SIMT_SITE);
/* Into every block of the cluster whose bit is set in the mask. */
void simt_tensor_load_multicast(void *shared, const void *map, int x, int y, uint64_t *bar, unsigned mask, SIMT_SITE);
void simt_tensor_store(const void *map, int x, int y, const void *shared, SIMT_SITE);
void simt_tensor_add(const void *map, int x, int y, const void *shared, SIMT_SITE);

unsigned simt_wgmma_address(const void *shared, SIMT_SITE); /* for a matrix descriptor: the offset in the block's memory */
/* m64nNk16 with bf16 operands; registers: the thread's fragment of A, or NULL where descriptor a is that of A. */
void simt_wgmma(int n, int transpose_a, int transpose_b, float *d, uint64_t a, const uint32_t *registers, uint64_t b,
                int accumulate, SIMT_SITE);
void simt_wgmma_fence(SIMT_SITE);
void simt_wgmma_commit(SIMT_SITE);
void simt_wgmma_wait(unsigned groups, SIMT_SITE);           /* all but the latest `groups` groups are done */

void simt_named_barrier(int barrier, int threads, SIMT_SITE);
char *simt_matrix_row(void *shared_row, SIMT_SITE);         /* stmatrix's row in this block's shared memory, checked */

/* To be called in every spin loop: lets others run. A grid that does nothing but spin is reported as a deadlock. */
void simt_yield(SIMT_SITE);

/* ---- shared memory ---------------------------------------------------------------------------------------------------------------------- */

struct simt_variable {          /* one LK_SHARED declaration; its address is its identity */
    const char *name;
    size_t bytes, alignment;
    const char *file;
    int line;
};
void *simt_shared(const simt_variable *variable);
void *simt_dynamic_shared(size_t bytes, SIMT_SITE);     /* bytes: what the kernel's struct takes, checked against the launch */

/* ---- checks ----------------------------------------------------------------------------------------------------------------------------- */

/* Reports at file:line and abandons the launch; does not return to a kernel. Outside a kernel it only reports. */
void simt_fail(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* What a CUtensorMap of the simulator holds. Innermost dimension first; strides in bytes, that of dimension 1 first. */
static const uint64_t SIMT_TENSOR_MAGIC = 0x74656e736f726d70u;
struct simt_tensor {
    uint64_t magic;
    char *base;
    int64_t size[3], stride[2];
    unsigned box[3], rank, type, element, span; /* element: bytes of one; span: bytes of a swizzled row, 0: no swizzle */
};

/* ---- between runtime.cpp and engine.cpp --------------------------------------------------------------------------------------------------- */

struct simt_launch_shape {
    const void *kernel;         /* for its name in reports */
    dim3 grid, block, cluster;
    size_t dynamic_bytes;
    size_t most_bytes;          /* static and dynamic together: 48 KiB, what the device has where the kernel's limit was set */
};
/* Runs the grid to its end; body calls the kernel with its arguments, once for each thread. Returns 0, or -1 after a report. */
int simt_run(const simt_launch_shape *shape, const std::function<void()> &body);

/* Recursive. TSan must not see it, or it would take calls of two host threads for ordered where nothing in the program does
   so: these two files are compiled without TSan, which then knows mutexes but no atomics. */
#if defined(SIMT_TSAN)
struct simt_mutex {
    std::atomic<const void *> owner{NULL};
    int depth = 0;
    void lock(void);
    void unlock(void);
};
#else
typedef std::recursive_mutex simt_mutex;
#endif

int simt_poison_byte(void);
bool simt_range_fits(const void *at, size_t bytes);     /* false if it starts in a cudaMalloc'd piece and ends beyond */
void simt_report_text(const char *text);    /* stores and prints a report made outside a kernel */

#endif

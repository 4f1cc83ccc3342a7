// SPDX-License-Identifier: MIT
/*
simt: CUDA kernels on the CPU.

The .cuh and .cu files of this project compile with plain g++ -std=c++17 -DLK_SIMT -Itests/simt, against the stand-in headers in
this folder, which have the names of CUDA's. They run here block by block. This file is the manual, and the interface between
those headers and the engine: reports.cpp, fibers.cpp, warps.cpp, copies.cpp, tensor_maps.cpp and warpgroups.cpp. Kernels do not
call it. The functions of simt_ptx.h do, which take the place of inline PTX.

How it works
    Every CUDA thread of a block is a fiber: a stack of its own, and a switch that takes a few nanoseconds. All blocks of a
    cluster are alive at once on one OS thread; independent clusters are spread over several OS threads. A thread runs until it
    has to wait for others (a barrier, a warp operation, a spin loop's yield). Then the schedule picks the next ready one. A
    warp operation is one function: each lane stores its value and its request, and the last lane computes the result of each.

What it reports (stderr, simt_last_report(), and cudaErrorLaunchFailure from the launch)
    Barriers: two lines reached by one block, a thread that has exited or waits elsewhere. Warp operations: lanes that are
    missing, masks without the caller or with lanes that have exited or do not exist, shuffles from a lane outside the mask.
    Deadlocks, with block, threads, file and line of all that wait. Memory: misaligned vectors through __ldg and the like,
    writes just past a shared variable, a TempStorage of cub reused without a barrier, shared memory of another block before the
    first cluster barrier, or with no barrier between the access and that block's exit. Shared memory and cudaMalloc are filled
    with 0xFF bytes (NaN, -1), so what was never written shows in results.
    ASan and UBSan add every access out of bounds, to the byte, misaligned vectors and leaks. TSan finds races: barriers,
    __syncwarp and cluster barriers order accesses, shuffles do not.

mbarriers, bulk copies, st.async and cp.async
    A wait parks its thread until the phase ends; mbarrier.try_wait yields. A load or st.async is in flight until it lands. Lazy
    copies land when nothing else of the cluster can run, oldest first; eager ones where they are issued; random ones now and
    then, any of them. From its issue on, the destination of a copy is poison: a thread that reads before the wait, or from a
    slot that was given back too early, sees NaN. A bulk store reads and writes when its thread waits for it, or earlier where
    copies are eager or random. So does a cp.async.
    Reported:
    - addresses and sizes that are not multiples of 16 (8 for st.async), and ranges that leave a shared variable or an
      allocation;
    - an mbarrier that is not initialised, is overwritten, is initialised twice, or is used by copies or other blocks with no
      fence.mbarrier_init after its init;
    - an arrival too many, a byte count out of range, a phase that ends with copies in flight to it (too few bytes announced),
      or that ends again before the threads that wait for the last one have run;
    - a wait for a parity that returns at once, for a phase that the thread has waited for, or before the first phase of an
      mbarrier that counts bytes; a wait at block scope where other blocks arrived;
    - a copy to a slot that another copy fills or that a bulk store has not read;
    - the source of a bulk store that is in flight, changed before the wait, or written with no fence.proxy.async by any thread
      since the last copy there; a thread that exits with stores not waited for;
    - a block that exits with copies in flight to it, bytes missing or too many, or bytes that no thread waited for; another
      block that has not started or has exited;
    - a cp.async that is misaligned, not of 4, 8 or 16 bytes, not to this block's shared memory or from there, never committed
      or never waited for (ranges that leave a variable or an allocation: only in ASan's build).
    A deadlock names the mbarriers, with the arrivals and bytes that they miss.
    TSan sees arrivals and waits, and each copy as a thread of its own, from its issue to the phase's end or the wait for its
    group. It finds a slot reused or read too early under any schedule, a proxy fence that one of the writers lacks, and an init
    with no barrier before its use. A cp.async belongs to its thread: another thread that reads its destination, or writes its
    source, with no barrier after the wait is a race.
    Not seen: fences between reads or writes and a copy over them, two cp.async of one thread to one address, wrong counts that
    add up, L2 policies, and whether the arrivals of one warp stand for those of another (TSan sees the race that this leads
    to).

Tensor copies, wgmma, stmatrix and named barriers
    cudaGetDriverEntryPointByVersion finds cuTensorMapEncodeTiled. It refuses what CUDA's documentation forbids. As not
    supported it refuses types other than f16, bf16 and f32, interleaved and im2col layouts, steps other than 1, fills other
    than zeros, and more than three dimensions. Copies move boxes of two dimensions, with rows as long as the swizzle where
    there is one. All that is said above of bulk copies holds for tensor copies; a multicast is one in each block.
    wgmma multiplies bf16, with operands in a swizzle of 128 bytes, K- or MN-major, or with A in registers. Products are added
    in float in the order of k, so that a plain loop gives the same bits. Its threads need not wait for one another: when the
    last of the 128 has issued it, the engine reads the operands and multiplies. Sums are NaN from the issue to the wait that
    returns them. A wgmma is done when the first thread of its warpgroup passes the wait for its group: lazily, when nothing
    else of the cluster can run; eagerly, once all have issued it; else at random. Until then its operands must not change.
    Reported, in addition to what is reported of bulk copies:
    - an address that is not a map, a map that is misaligned, in shared memory or of another rank; a shared address that is not
      a multiple of 128; a multicast to a block that is not in the cluster, has not started or has exited;
    - a descriptor that does not start where the swizzle's pattern does, or leads out of a shared variable;
    - operands that have not landed, that threads wrote with no fence.proxy.async since, or that are written or copied over
      before the wait;
    - threads of a warpgroup that issue different wgmma, a deadlock where some issue none, a warpgroup that is not whole;
    - no wgmma.fence before the first wgmma, after sums have changed or start again, or between a wait and A in registers;
    - sums written before the wait, a group not committed or not waited for, more than 64 wgmma not waited for;
    - a named barrier outside 1 to 15, for other than whole warps or for different counts, or with half a warp.
    TSan sees a wgmma as five readers between its issue and the wait: each warp, after that warp's issue, and one that only
    fences and landings order. Additions to global memory may run together without a race.
    Not seen: sums read between a wait and the next wgmma with no wgmma.fence; registers of A changed before the wait; a
    compiler that moves reads of sums before the wait; whether setmaxnreg finds registers, and whether whole warpgroups execute
    it; shared memory that begins, on a GPU, at an address that is not a multiple of 1024.

What it does not model
    Programmatic dependent launch; memory fences (atomics order as acquire-release; two kinds are looked for, see above); how
    tensor cores round; approximate instructions, to the bit; streams that run at once; register limits; static shared memory
    before the kernel runs; speed. Warps do not run in lockstep. No schedule finds every bug: run forward, reverse, and random.

Environment
    SIMT_SCHEDULE=forward|reverse|random:SEED   order of threads and of blocks (forward)
    SIMT_COPIES=lazy|eager|random:SEED          order of asynchronous copies (lazy forward, eager in reverse, else random)
    SIMT_THREADS=N                              OS threads (one per core; always 1 under TSan)
    SIMT_POISON=0xFF                            the byte that fills new memory; another than 0xFF guards against
                                                fmaxf(NaN, x) = x
    SIMT_SMS=4                                  multiprocessors that the device claims to have
    SIMT_SMEM=228                               KiB of shared memory that each of them claims to have
    SIMT_PLAN=0                                 1: nothing runs; each launch is printed, with its grid
    SIMT_CODE=90                                the compute capability that kernels claim to be compiled for
    SIMT_DEVICES=1                              devices, 8 at most. Those with odd numbers are older: compute capability 8.0,
                                                no clusters, 3 more multiprocessors, of 100 KiB

How to step through a kernel
    g++ -std=c++17 -O0 -g -DLK_SIMT -Itests/simt ..., then
        SIMT_THREADS=1 gdb ./program
        (gdb) break my_kernel if simt_here->thread_idx.x == 5 && simt_here->block_idx.x == 2
        (gdb) run
    `next` stays with the thread until it waits, and is back with it when the wait is over, as long as the breakpoint's
    condition holds for this thread alone. `print *simt_here` tells which thread runs. `backtrace` ends at the kernel's caller
    in the engine. Under SIMT_SCHEDULE=forward thread 0 runs up to its first wait before thread 1 starts.

How to build
    The .cpp files of the engine, and runtime.cpp, are compiled once and never with -fsanitize. -DSIMT_ASAN or -DSIMT_TSAN makes
    the engine tell that sanitizer about its fibers. The program is compiled and linked with the sanitizer.
*/
#ifndef SIMT_H
#define SIMT_H

#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <functional>
#include <mutex>

#include "vector_types.h"

/* ---- for programs and tests ------------------------------------------------------------------------------------------ */

const char *simt_last_report(void);                 /* text of the last error report, "" if there was none */
void simt_clear_report(void);
void simt_quiet(int quiet);                         /* 1: reports are kept for simt_last_report but not printed */
void simt_set_schedule(const char *schedule);       /* "forward", "reverse", "random:SEED"; NULL: what the environment says */
void simt_set_copies(const char *copies);      /* "lazy", "eager", "random:SEED"; NULL: the environment, else by schedule */

/* ---- where the running thread is ------------------------------------------------------------------------------------- */

struct simt_coordinates {
    uint3 thread_idx, block_idx;
    dim3 block_dim, grid_dim;
};

/* initial-exec: one load from the thread register. The engine and the kernels are always in the executable itself. */
extern __thread const simt_coordinates *simt_here __attribute__((tls_model("initial-exec")));

unsigned simt_lane(void);                           /* 0..31 */

/* ---- collectives: all take the caller's file and line for the reports ------------------------------------------------ */

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
void simt_cluster_arrive_relaxed(SIMT_SITE);    /* publishes only mbarriers with a fence.mbarrier_init */
void simt_cluster_wait(SIMT_SITE);
/* The address, in block `rank` of the cluster, of what is at `smem` in this block. Ask after the first cluster barrier, and
   between the same two barriers in which the address is used: the engine takes the call for the access. */
void *simt_cluster_map(const void *smem, unsigned rank, SIMT_SITE);

/* ---- mbarriers and asynchronous copies: called by simt_ptx.h --------------------------------------------------------- */

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
/* A prefetch reads nothing. Under ASan its bytes must be there all the same. While `allowed` they may be poisoned: a test
   poisons bytes that are there and must not be read. */
void simt_allow_poisoned_prefetch(int allowed);
void simt_fence_proxy_async(void);
void simt_st_async(unsigned to, uint64_t value, unsigned bar, SIMT_SITE);
/* cp.async: a thread's own copies, of 4, 8 or 16 bytes, in groups of their own. */
void simt_cp_async(void *to, const void *from, size_t bytes, SIMT_SITE);
void simt_cp_async_commit(SIMT_SITE);
void simt_cp_async_wait(unsigned groups, SIMT_SITE); /* all but the latest `groups` groups have landed */

/* ---- tensor copies, warpgroups, named barriers ----------------------------------------------------------------------- */

void *simt_tensor_encoder(void);              /* cuTensorMapEncodeTiled */
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

/* Every spin loop calls this: others run. A grid that only spins is reported as a deadlock. */
void simt_yield(SIMT_SITE);

/* ---- shared memory --------------------------------------------------------------------------------------------------- */

struct simt_variable {          /* one static shared variable of a kernel; its address is its identity */
    const char *name;
    size_t bytes, alignment;
    const char *file;
    int line;
};
void *simt_shared(const simt_variable *variable);
void *simt_dynamic_shared(size_t bytes, SIMT_SITE);     /* bytes: what the kernel's struct takes, checked against the launch */

/* ---- checks ---------------------------------------------------------------------------------------------------------- */

/* Reports at file:line and abandons the launch; does not return to a kernel. Outside a kernel it only reports. */
void simt_fail(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* ---- between runtime.cpp and the engine ------------------------------------------------------------------------------ */

struct simt_launch_shape {
    const void *kernel;         /* for its name in reports */
    dim3 grid, block, cluster;
    size_t dynamic_bytes;
    size_t most_bytes;          /* static and dynamic together: 48 KiB, what the device has where the kernel's limit was set */
};
/* Runs the grid to its end; `body` calls the kernel with its arguments, once per thread. Returns 0, or -1 after a report. */
int simt_run(const simt_launch_shape *shape, const std::function<void()> &body);

/* Recursive. TSan must not see it, or it would take calls of two host threads for ordered where nothing in the program does
   so: runtime.cpp and the engine are compiled without TSan, which then knows mutexes but no atomics. */
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
bool simt_plans(void); // SIMT_PLAN=1
bool simt_range_fits(const void *at, size_t bytes);     /* false if it starts in a cudaMalloc'd piece and ends beyond */
void simt_report_text(const char *text);    /* stores and prints a report made outside a kernel */

#endif

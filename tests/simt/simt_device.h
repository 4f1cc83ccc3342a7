// SPDX-License-Identifier: MIT
// Device functions of CUDA's global namespace for the simulator: barriers, warp operations, atomics, arithmetic, loads and stores. Included by cuda_runtime.h.
#ifndef SIMT_DEVICE_H
#define SIMT_DEVICE_H

/* ---- barriers and fences --------------------------------------------------------------------------------------------- */

static inline void __syncthreads(SIMT_SITE) { simt_block_barrier(0, file, line); }
static inline int __syncthreads_count(int predicate, SIMT_SITE) { return simt_block_barrier(predicate, file, line); }
static inline int __syncthreads_or(int predicate, SIMT_SITE) { return simt_block_barrier(predicate, file, line) != 0; }
static inline int __syncthreads_and(int predicate, SIMT_SITE) { return simt_block_barrier(!predicate, file, line) == 0; }
static inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_SITE) { simt_warp(SIMT_SYNCWARP, mask, 0, 0, file, line); }
static inline void __threadfence(void) {}
static inline void __threadfence_block(void) {}
static inline void __threadfence_system(void) {}
static inline void __nanosleep(unsigned, SIMT_SITE) { simt_yield(file, line); }
static inline void __trap(SIMT_SITE) { simt_fail(file, line, "__trap"); }

/* ---- warp operations ------------------------------------------------------------------------------------------------- */

template <typename T> static inline T simt_shuffle(unsigned mask, T value, unsigned source, const char *file, int line) {
    static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8), "shuffles take the 4 and 8 byte types");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = simt_warp(SIMT_SHFL, mask, bits, source, file, line);
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}
template <typename T> static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_SITE) {
    unsigned lane = simt_lane();
    return simt_shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), file, line);
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, SIMT_SITE) {
    unsigned lane = simt_lane(), source = lane ^ lanes;
    return simt_shuffle(mask, value, source <= (lane | (width - 1)) ? source : lane, file, line);
}
template <typename T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
    unsigned lane = simt_lane(), source = lane + delta;
    return simt_shuffle(mask, value, source <= (lane | (width - 1)) ? source : lane, file, line);
}
template <typename T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
    unsigned lane = simt_lane();
    return simt_shuffle(mask, value, (lane & (width - 1)) >= delta ? lane - delta : lane, file, line);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_SITE) { return simt_warp(SIMT_BALLOT, mask, predicate != 0, 0, file, line); }
static inline int __all_sync(unsigned mask, int predicate, SIMT_SITE) { return simt_warp(SIMT_ALL, mask, predicate != 0, 0, file, line); }
static inline int __any_sync(unsigned mask, int predicate, SIMT_SITE) { return simt_warp(SIMT_ANY, mask, predicate != 0, 0, file, line); }
static inline unsigned __match_any_sync(unsigned mask, unsigned value, SIMT_SITE) { return simt_warp(SIMT_MATCH_ANY, mask, value, 0, file, line); }
static inline unsigned __match_any_sync(unsigned mask, int value, SIMT_SITE) { return simt_warp(SIMT_MATCH_ANY, mask, (unsigned)value, 0, file, line); }
static inline unsigned __match_any_sync(unsigned mask, unsigned long long value, SIMT_SITE) { return simt_warp(SIMT_MATCH_ANY, mask, value, 0, file, line); }

#define SIMT_REDUCE(name, type, operation) \
    static inline type name(unsigned mask, type value, SIMT_SITE) { return (type)simt_warp(operation, mask, (unsigned)value, 0, file, line); }
SIMT_REDUCE(__reduce_add_sync, unsigned, SIMT_ADD)
SIMT_REDUCE(__reduce_add_sync, int, SIMT_ADD)
SIMT_REDUCE(__reduce_min_sync, unsigned, SIMT_MIN_U32)
SIMT_REDUCE(__reduce_min_sync, int, SIMT_MIN_S32)
SIMT_REDUCE(__reduce_max_sync, unsigned, SIMT_MAX_U32)
SIMT_REDUCE(__reduce_max_sync, int, SIMT_MAX_S32)
SIMT_REDUCE(__reduce_and_sync, unsigned, SIMT_AND)
SIMT_REDUCE(__reduce_or_sync, unsigned, SIMT_OR)
SIMT_REDUCE(__reduce_xor_sync, unsigned, SIMT_XOR)
#undef SIMT_REDUCE

/* stmatrix.m8n8.x4: the stores are made here, where the sanitizers see them. */
static inline void simt_stmatrix(void *shared_row, unsigned a, unsigned b, unsigned c, unsigned d, const char *file, int line) {
    char *row = simt_matrix_row(shared_row, file, line), *rows[32];
    const unsigned value[4] = {a, b, c, d}, lane = simt_lane();
    simt_warp_gather(0xffffffffu, &row, rows, sizeof row, file, line);
    for (unsigned i = 0; i < 4; i++) ((unsigned *)rows[8 * i + lane / 4])[lane % 4] = value[i];
}

/* ---- atomics ------------------------------------------------------------------------------------------------------------
   Acquire-release, which is stronger than CUDA's relaxed atomics: fences are not modelled, so atomics also give the order of a fence
   next to them. */

#define SIMT_ATOMIC(name, type, expression)                                                                  \
    static inline type name(type *at, type value) {                                                          \
        type old = __atomic_load_n(at, __ATOMIC_ACQUIRE), next;                                              \
        do { next = (expression); } while (!__atomic_compare_exchange_n(at, &old, next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)); \
        return old;                                                                                          \
    }
#define SIMT_ATOMIC_INTEGER(type)                                                                            \
    SIMT_ATOMIC(atomicAdd, type, (type)(old + value))                                                        \
    SIMT_ATOMIC(atomicMax, type, old > value ? old : value)                                                  \
    SIMT_ATOMIC(atomicMin, type, old < value ? old : value)                                                  \
    SIMT_ATOMIC(atomicAnd, type, old & value)                                                                \
    SIMT_ATOMIC(atomicOr, type, old | value)                                                                 \
    SIMT_ATOMIC(atomicXor, type, old ^ value)                                                                \
    static inline type atomicExch(type *at, type value) { return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL); } \
    static inline type atomicCAS(type *at, type compare, type value) {                                       \
        __atomic_compare_exchange_n(at, &compare, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);         \
        return compare;                                                                                      \
    }
SIMT_ATOMIC_INTEGER(unsigned)
SIMT_ATOMIC_INTEGER(unsigned long long)
SIMT_ATOMIC(atomicMax, long long, old > value ? old : value)
SIMT_ATOMIC(atomicMin, long long, old < value ? old : value)
SIMT_ATOMIC(atomicMax, int, old > value ? old : value)
SIMT_ATOMIC(atomicMin, int, old < value ? old : value)
SIMT_ATOMIC(atomicSub, unsigned, old - value)
SIMT_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
SIMT_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
static inline int atomicAdd(int *at, int value) { return (int)atomicAdd((unsigned *)at, (unsigned)value); }
static inline int atomicSub(int *at, int value) { return (int)atomicSub((unsigned *)at, (unsigned)value); }
static inline int atomicAnd(int *at, int value) { return (int)atomicAnd((unsigned *)at, (unsigned)value); }
static inline int atomicOr(int *at, int value) { return (int)atomicOr((unsigned *)at, (unsigned)value); }
static inline int atomicXor(int *at, int value) { return (int)atomicXor((unsigned *)at, (unsigned)value); }
static inline int atomicExch(int *at, int value) { return (int)atomicExch((unsigned *)at, (unsigned)value); }
static inline int atomicCAS(int *at, int compare, int value) { return (int)atomicCAS((unsigned *)at, (unsigned)compare, (unsigned)value); }
#undef SIMT_ATOMIC_INTEGER
#undef SIMT_ATOMIC

/* ---- bits ------------------------------------------------------------------------------------------------------------ */

#define SIMT_BIT_CAST(name, to, from) static inline to name(from value) { to bits; __builtin_memcpy(&bits, &value, sizeof bits); return bits; }
SIMT_BIT_CAST(__float_as_uint, unsigned, float)
SIMT_BIT_CAST(__float_as_int, int, float)
SIMT_BIT_CAST(__uint_as_float, float, unsigned)
SIMT_BIT_CAST(__int_as_float, float, int)
SIMT_BIT_CAST(__double_as_longlong, long long, double)
SIMT_BIT_CAST(__longlong_as_double, double, long long)
#undef SIMT_BIT_CAST

static inline int __clz(int value) { return value ? __builtin_clz((unsigned)value) : 32; }
static inline int __clzll(long long value) { return value ? __builtin_clzll((unsigned long long)value) : 64; }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) /* without PTX's copies of a sign */
{
    const unsigned long long bytes = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
static inline int __popc(unsigned value) { return __builtin_popcount(value); }
static inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
static inline int __ffs(int value) { return __builtin_ffs(value); }
static inline int __ffsll(long long value) { return __builtin_ffsll(value); }
static inline unsigned __brev(unsigned value) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (value >> i & 1) << (31 - i);
    return reversed;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)((unsigned __int128)a * b >> 64); }
static inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
static inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }

/* atomicAdd of floats: through the bits, in the order of the schedule */
static inline float atomicAdd(float *at, float value) {
    unsigned *bits = (unsigned *)at, old = __atomic_load_n(bits, __ATOMIC_ACQUIRE);
    while (!__atomic_compare_exchange_n(bits, &old, __float_as_uint(__uint_as_float(old) + value), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    return __uint_as_float(old);
}
static inline float atomicExch(float *at, float value) { return __uint_as_float(atomicExch((unsigned *)at, __float_as_uint(value))); }

/* ---- arithmetic ---------------------------------------------------------------------------------------------------------
   The approximate functions are as exact as libm here: limits of accuracy are judged on a GPU. */

static inline float rsqrtf(float x) { return (float)(1.0 / sqrt((double)x)); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frsqrt_rn(float x) { return rsqrtf(x); }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1.0f : 0.0f; }
/* volatile: like the intrinsics, these are not changed by -ffp-contract or -ffast-math */
static inline float __fadd_rn(float x, float y) { volatile float r = x + y; return r; }
static inline float __fsub_rn(float x, float y) { volatile float r = x - y; return r; }
static inline float __fmul_rn(float x, float y) { volatile float r = x * y; return r; }
static inline int __float2int_rn(float x) { return (int)rintf(x); }
static inline int __float2int_rd(float x) { return (int)floorf(x); }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
static inline float __ll2float_rn(long long x) { return (float)x; }
static inline float __ull2float_rn(unsigned long long x) { return (float)x; }
static inline float __double2float_rn(double x) { return (float)x; }
static inline void sincospif(float x, float *s, float *c) { *s = (float)sin(M_PI * fmod(x, 2)), *c = (float)cos(M_PI * fmod(x, 2)); }
/* glibc declares functions of these names, so here they are macros */
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __tanhf(x) tanhf(x)
#define __powf(x, y) powf(x, y)
#define __sincosf(x, s, c) sincosf(x, s, c)

#define SIMT_MIN_MAX(type)                                            \
    static inline type min(type a, type b) { return b < a ? b : a; }  \
    static inline type max(type a, type b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
#undef SIMT_MIN_MAX
static inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
static inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
static inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
static inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }

static inline long long clock64(void) {
    static long long ticks;
    return __atomic_add_fetch(&ticks, 1, __ATOMIC_RELAXED);
}

/* ---- loads and stores with cache hints, which fault on what the GPU would fault on ----------------------------------- */

template <typename T> static inline T *simt_aligned(T *at, const char *file, int line) {
    static_assert(sizeof(T) <= 16, "one access moves at most 16 bytes");
    if (__builtin_expect((uintptr_t)at % sizeof(T), 0)) simt_fail(file, line, "misaligned access of %zu bytes at %p", sizeof(T), (const void *)at);
    return at;
}
#define SIMT_LOAD(name) template <typename T> static inline T name(const T *from, SIMT_SITE) { return *simt_aligned(from, file, line); }
#define SIMT_STORE(name) template <typename T> static inline void name(T *to, T value, SIMT_SITE) { *simt_aligned(to, file, line) = value; }
SIMT_LOAD(__ldg)
SIMT_LOAD(__ldca)
SIMT_LOAD(__ldcg)
SIMT_LOAD(__ldcs)
SIMT_LOAD(__ldlu)
SIMT_LOAD(__ldcv)
SIMT_STORE(__stwb)
SIMT_STORE(__stcg)
SIMT_STORE(__stcs)
SIMT_STORE(__stwt)
#undef SIMT_LOAD
#undef SIMT_STORE

#endif

// SPDX-License-Identifier: MIT
/* test.h - the harness that the tests of all ops share.
 *
 *   ./test [--small] [--stop] [--case SUBSTRING] [--without WORD] [--part K/N]      V=n FUZZ=n FUZZ_SEED=s in the environment
 *
 * --small cuts the shapes down so that a run under a sanitizer takes seconds; every path, direction and type still runs.
 * --case runs only the cases whose name contains SUBSTRING, --without those that do not have WORD in it. --part K/N runs a part
 * of the cases, an Nth on average: their names' hashes say which. All N parts together are all cases. --stop ends the run at the
 * first case that fails. FUZZ=n draws n random configurations; the seed is printed.
 *
 * The first line says what runs where. A case that fails prints `FAIL  case  error  bound  checks` and, below, the first check
 * that failed with all that reproduces it. Cases that pass are summed up in a table at the end, a line per group of cases: how
 * many, the largest error, its bound, how many checks. The last line is `N passed, N failed`, both in cases. The exit status is
 * 0 only if none failed. V=1 prints a line per case instead of the table, V=0 failed cases alone.
 *
 * A group is the part of a name that its cases share:
 *
 *   forward f32 warp: lengths      lengths            begins with a direction or a type: the group is behind the colon
 *   threads: scale f32             threads            else the group is before the colon,
 *   accuracy f32, fast logits      accuracy           and it ends at a type, a direction or a comma
 *
 *   int main(int argc, char **argv) {
 *       test_start(argc, argv);
 *       if (test_begin("f32 lengths")) {                      a case; false when --case leaves it out
 *           if (!test_within(fabs(got - want), limit))        one check of it, as many as wanted
 *               test_detail("at %d: got %g, want %g", ...);   kept for the first check that failed
 *           test_finish();                                    prints the line, with the worst error / limit
 *       }
 *       test_check("one number", error, limit);               a case of a single check
 *       return test_end();
 *   }
 *
 * A test_buffer is device memory with a zone of 256 bytes or more on both sides and a mirror on the host. test_buffer_size
 * fills everything with a poison byte, the caller writes inputs through test_buffer_host, test_buffer_upload copies all of it,
 * the op runs, test_buffer_download brings all of it back to test_buffer_back. test_buffer_accept marks an element as allowed
 * to change; then test_buffer_untouched demands that every other byte, in the zones, between strided rows and in inputs, is
 * as it was uploaded. Under ASan the zones cannot be read while the op runs either.
 */
#ifndef TEST_H
#define TEST_H

#include <cuda_runtime.h>
#include <ctype.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lk/lk_base.cuh"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(LK_SIMT) && defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define TEST_ASAN 1
#else
#define TEST_ASAN 0
#endif

typedef struct {
    char name[64];
    long cases, failed, checks;
    double error, limit, worst; /* of the check that came closest to its limit */
} test_group;

enum { TEST_FAILURES, TEST_GROUPS, TEST_CASES, TEST_MOST_GROUPS = 128 };

typedef struct {
    bool small, selected, stop; /* selected: --case, --without or --part was given; stop: at the first case that fails */
    int prints; /* TEST_FAILURES alone, TEST_GROUPS too, or all TEST_CASES */
    const char *only, *without;
    unsigned part, parts; /* --part; parts is 0 without it */
    long fuzz; /* -1: not given */
    uint64_t fuzz_seed;
    int sms, arch;
    long passed, failed;
    cudaStream_t stream; /* all work runs here; it does not wait for the legacy stream */
    test_group groups[TEST_MOST_GROUPS];
    int group_count;
    /* the open case */
    bool open;
    char name[128], detail[1536];
    long checks, bad;
    double error, limit, worst;
} test_state;

static test_state test;

#define LENGTH_OF(list) ((int)(sizeof(list) / sizeof((list)[0])))
#define TEST_OF_TYPES(name) {name##_f32, name##_f16, name##_bf16} /* in the order of TEST_F32, ... */

/* An op's functions of all types. tests/mutate builds those by themselves. */
#if !defined(TEST_SPLIT)
#define TEST_DEFINE(OP) LK_DEFINE_##OP(f32) LK_DEFINE_##OP(f16) LK_DEFINE_##OP(bf16)
#else
#define TEST_DEFINE(OP) LK_DECLARE_##OP(f32) LK_DECLARE_##OP(f16) LK_DECLARE_##OP(bf16)
#endif

static inline int test_pick(int full, int small)
{
    return test.small ? small : full;
}

static inline bool test_clusters(void) /* whether the device has them */
{
    return test.arch >= 90;
}

/* Memory of `want` bytes or more; what `pointer` has is kept. */
static inline void *test_room(void *pointer, size_t *have, size_t want)
{
    if (want <= *have) return pointer;
    *have = 2 * want;
    return realloc(pointer, *have);
}

static inline void test_print_groups(void)
{
    printf("%-44s %5s %14s %10s %10s\n", "group", "cases", "largest error", "bound", "checks");
    for (const test_group *g = test.groups; g < test.groups + test.group_count; g++) {
        printf("%-44s %5ld ", g->name, g->cases);
        if (g->error == 0 && g->limit == 0) printf("%14s %10s", "-", "-"); /* its checks are right or wrong */
        else printf("%14.3g %10.3g", g->error, g->limit);
        printf(" %10ld", g->checks);
        if (g->failed) printf("   %ld FAILED", g->failed);
        printf("\n");
    }
}

static inline int test_end(void)
{
    if (test.prints == TEST_GROUPS && test.group_count) test_print_groups();
    printf("%ld passed, %ld failed\n", test.passed, test.failed);
    return test.failed ? 1 : 0;
}

/* A failure of the harness's own calls ends the run: after a CUDA error nothing that follows means anything. */
static inline void test_cuda(cudaError_t error, const char *call, const char *file, int line)
{
    if (error == cudaSuccess) return;
    printf("FAIL %s\n     %s:%d: %s: %s\n     %s\n", test.name, file, line, call, cudaGetErrorString(error), test.detail);
    test.failed++;
    exit(test_end());
}
#define TEST_CUDA(call) test_cuda(call, #call, __FILE__, __LINE__)

static __global__ void test_code_kernel(void) {} /* to be asked what it was compiled for */

/* A program that dies, or that is ended at its time limit, says in which case. */
static void test_died(void)
{
    char text[sizeof test.name + 64];
    if (!test.open) return;
    const int n = snprintf(text, sizeof text, "FAIL %s: the program died in this case\n", test.name);
    if (write(1, text, (size_t)n) != n) return;
}

static void test_died_of_signal(int number)
{
    test_died();
    raise(number); /* its action is the default again */
}

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_on_report(void *) /* after each report; the run goes on */
{
    fprintf(stderr, "the report above is of case %s\n", test.open ? test.name : "none");
}
#endif

#if defined(__SANITIZE_ADDRESS__)
extern "C" const char *__ubsan_default_options(void) /* it has no callback */
{
    return "abort_on_error=1";
}
#endif

static inline void test_watch_for_death(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    __sanitizer_set_death_callback(test_died);
    static const int numbers[] = {SIGABRT, SIGTERM}; /* the sanitizer reports the others */
#else
    static const int numbers[] = {SIGABRT, SIGTERM, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
#endif
    static char memory[1 << 15]; /* a stack of its own: the program's may be what overflowed */
    stack_t stack = {};
    stack.ss_sp = memory, stack.ss_size = sizeof memory;
    sigaltstack(&stack, NULL);
    struct sigaction action = {};
    action.sa_handler = test_died_of_signal, action.sa_flags = SA_ONSTACK | (int)SA_RESETHAND;
    for (const int number : numbers) sigaction(number, &action, NULL);
}

static inline void test_start(int argc, char **argv)
{
    const char *fuzz = getenv("FUZZ"), *seed = getenv("FUZZ_SEED"), *prints = getenv("V");
    test.prints = !prints || !*prints ? TEST_GROUPS : *prints == '0' ? TEST_FAILURES : TEST_CASES;
    test.fuzz = fuzz ? atol(fuzz) : -1;
    test.fuzz_seed = seed ? strtoull(seed, NULL, 0) : 1;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--small")) test.small = true;
        else if (!strcmp(argv[i], "--stop")) test.stop = true;
        else if (!strcmp(argv[i], "--case") && i + 1 < argc) test.selected = true, test.only = argv[++i];
        else if (!strcmp(argv[i], "--without") && i + 1 < argc) test.selected = true, test.without = argv[++i];
        else if (!strcmp(argv[i], "--part") && i + 1 < argc && sscanf(argv[i + 1], "%u/%u", &test.part, &test.parts) == 2 &&
                 test.part < test.parts)
            test.selected = test.parts > 1, i++;
        else {
            fprintf(stderr, "usage: %s [--small] [--stop] [--case SUBSTRING] [--without WORD] [--part K/N]\n", argv[0]);
            exit(2);
        }
    }
    setvbuf(stdout, NULL, _IOLBF, 1 << 12); /* a crash loses no line */
    test_watch_for_death();
    cudaFuncAttributes code;
    TEST_CUDA(cudaDeviceGetAttribute(&test.sms, cudaDevAttrMultiProcessorCount, 0));
    TEST_CUDA(cudaFuncGetAttributes(&code, test_code_kernel));
    test.arch = code.ptxVersion;
    const char *const slash = strrchr(argv[0], '/');
    printf("%s on ", slash ? slash + 1 : argv[0]);
#if defined(LK_SIMT)
    const char *schedule = getenv("SIMT_SCHEDULE");
    printf("the simulator, sm_%d, %d SMs, schedule %s", test.arch, test.sms, schedule ? schedule : "forward");
#else
    cudaDeviceProp device;
    TEST_CUDA(cudaGetDeviceProperties(&device, 0));
    printf("%s, sm_%d, %d SMs", device.name, test.arch, test.sms);
#endif
    printf(": %s shapes", test.small ? "small" : "all");
    if (test.only) printf(", cases with \"%s\"", test.only);
    if (test.without) printf(", without %s", test.without);
    if (test.parts > 1) printf(", part %u of %u", test.part + 1, test.parts);
    printf("\n");
    TEST_CUDA(cudaStreamCreateWithFlags(&test.stream, cudaStreamNonBlocking));
}

/* ---- Cases ----------------------------------------------------------------------------------------------------------- */

/* Whether the word at text is this one. */
static inline bool test_is_word(const char *text, const char *word)
{
    const size_t n = strlen(word);
    return !strncmp(text, word, n) && !isalnum((unsigned char)text[n]) && text[n] != '_';
}

static inline bool test_is_direction(const char *text)
{
    return test_is_word(text, "forward") || test_is_word(text, "backward") || test_is_word(text, "forward_backward");
}

static inline bool test_is_type(const char *text)
{
    return test_is_word(text, "f32") || test_is_word(text, "f16") || test_is_word(text, "bf16");
}

/* What --case, --without and --part say of a name. */
static inline bool test_wanted(const char *name)
{
    if (test.only && !strstr(name, test.only)) return false;
    for (const char *c = name; test.without && *c; c++)
        if ((c == name || c[-1] == ' ') && test_is_word(c, test.without)) return false;
    uint32_t hash = 2166136261u; /* FNV */
    for (const char *c = name; *c; c++) hash = (hash ^ (unsigned char)*c) * 16777619u;
    return test.parts < 2 || (hash >> 8) % test.parts == test.part;
}

/* The group of a case by its name, as the comment at the top says; a new one if there is none yet. */
static inline test_group *test_group_of(const char *name)
{
    const char *const colon = strstr(name, ": ");
    const char *const begin = colon && (test_is_direction(name) || test_is_type(name)) ? colon + 2 : name;
    const bool direction = test_is_direction(begin); /* "forward, then backward f32": a group of this name */
    const char *end = begin;
    for (; *end && end != colon; end++) {
        const bool word = end > begin && end[-1] == ' ';
        if (word && test_is_type(end)) break;
        if (!direction && (*end == ',' || (word && test_is_direction(end)))) break;
    }
    while (end > begin && end[-1] == ' ') end--;
    char key[sizeof test.groups->name];
    snprintf(key, sizeof key, "%.*s", (int)(end - begin), begin);
    test_group *g = test.groups;
    while (g < test.groups + test.group_count && strcmp(g->name, key)) g++;
    if (g == test.groups + TEST_MOST_GROUPS) return g - 1;
    if (g == test.groups + test.group_count) {
        memcpy(g->name, key, sizeof key);
        g->worst = -1;
        test.group_count++;
    }
    return g;
}

/* Closes the open case. */
static inline void test_finish(void)
{
    test_group *const g = test_group_of(test.name);
    g->cases++, g->failed += test.bad != 0, g->checks += test.checks;
    if (test.worst > g->worst) g->worst = test.worst, g->error = test.error, g->limit = test.limit;
    if (test.bad || test.prints == TEST_CASES)
        printf("%-4s %-58s %10.3g %10.3g  %ld checks\n", test.bad ? "FAIL" : "ok", test.name, test.error, test.limit, test.checks);
    if (test.bad) printf("     %ld failed, the first: %s\n", test.bad, test.detail);
    if (test.bad) test.failed++;
    else test.passed++;
    test.open = false;
    if (test.bad && test.stop) exit(test_end());
}

__attribute__((format(printf, 1, 2))) static inline bool test_begin(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(test.name, sizeof test.name, format, list);
    va_end(list);
    test.checks = test.bad = 0;
    test.error = test.limit = 0;
    test.worst = -1;
    test.detail[0] = 0;
    test.open = test_wanted(test.name);
    return test.open;
}

static inline bool test_within(double error, double limit)
{
    const bool good = error <= limit && limit >= 0; /* false for NaN */
    const double ratio = error == 0 ? 0 : good ? error / limit : INFINITY;
    test.checks++;
    if (ratio > test.worst) test.worst = ratio, test.error = error, test.limit = limit;
    if (!good) test.bad++;
    if (limit < 0 && !test.detail[0]) snprintf(test.detail, sizeof test.detail, "a negative limit, %g: the test is wrong", limit);
    return good;
}

/* A check that is right or wrong. */
static inline bool test_that(bool good)
{
    return test_within(good ? 0.0 : 1.0, 0.0);
}

/* Called after a check failed; only the first that is said is kept. */
__attribute__((format(printf, 1, 2))) static inline void test_detail(const char *format, ...)
{
    if (test.bad == 0 || test.detail[0]) return;
    va_list list;
    va_start(list, format);
    vsnprintf(test.detail, sizeof test.detail, format, list);
    va_end(list);
}

static inline void test_check(const char *name, double error, double limit)
{
    if (!test_begin("%s", name)) return;
    if (!test_within(error, limit)) test_detail("error %.9g, limit %.9g", error, limit);
    test_finish();
}

static inline void test_skip(const char *name, const char *reason)
{
    if (test.prints != TEST_FAILURES && test_wanted(name)) printf("skip %s: %s\n", name, reason);
}

/* What is good to know and is no check: printed among the cases. */
__attribute__((format(printf, 1, 2))) static inline void test_note(const char *format, ...)
{
    if (test.prints != TEST_CASES) return;
    va_list list;
    va_start(list, format);
    vprintf(format, list);
    va_end(list);
}

/* ---- Counts of what ran: path by option ------------------------------------------------------------------------------ */

enum { TEST_MOST_PATHS = 18, TEST_MOST_OPTIONS = 80 };
typedef struct {
    const char *const *paths, *const *options; /* names */
    int path_count, option_count;
    long runs[TEST_MOST_PATHS], of[TEST_MOST_PATHS][TEST_MOST_OPTIONS];
} test_counts;

/* Where the cases' lines are printed, and where FUZZ=n asks how often each option was drawn. */
static inline void test_counts_print(const test_counts *counts, const char *title)
{
    if (test.prints != TEST_CASES && test.fuzz < 0) return;
    printf("%-24s", title);
    for (int p = 0; p < counts->path_count; p++) printf(" %10s", counts->paths[p]);
    printf("\n%-24s", "calls");
    for (int p = 0; p < counts->path_count; p++) printf(" %10ld", counts->runs[p]);
    printf("\n");
    for (int o = 0; o < counts->option_count; o++) {
        printf("%-24s", counts->options[o]);
        for (int p = 0; p < counts->path_count; p++) printf(" %10ld", counts->of[p][o]);
        printf("\n");
    }
}

/* Whether an option can be asked for on a path: by their numbers in the counts. */
typedef bool (*test_possible)(int path, int option);

/* Checks that every option ran on every path that has it. */
static inline void test_counts_complete(const test_counts *counts, test_possible possible)
{
    for (int p = 0; p < counts->path_count; p++)
        for (int o = 0; o < counts->option_count; o++)
            if (possible(p, o) && !test_that(counts->of[p][o] > 0))
                test_detail("%s never ran \"%s\"", counts->paths[p], counts->options[o]);
}

/* The case of that, where all cases ran. complete: test_counts_complete, or what checks more than it. */
static inline void test_all_ran(const test_counts *counts, test_possible possible, void (*complete)(void) = NULL)
{
    if (test.selected) return;
    test_counts_print(counts, "calls by path and option");
    if (!test_begin("every option ran on every path that has it")) return;
    if (complete) complete();
    else test_counts_complete(counts, possible);
    test_finish();
}

/* The case of random draws, with the counts set to 0: how many to draw, FUZZ=n or the default. -1 where the case is left out. */
static inline long test_fuzz_begin(test_counts *counts, int full, int small)
{
    const long n = test.fuzz >= 0 ? test.fuzz : test_pick(full, small);
    const char *const who = test.fuzz < 0 ? " (default)" : "";
    if (!test_begin("fuzz: FUZZ=%ld FUZZ_SEED=%llu%s", n, (unsigned long long)test.fuzz_seed, who)) return -1;
    memset(counts->runs, 0, sizeof counts->runs), memset(counts->of, 0, sizeof counts->of);
    return n;
}

/* Its end: 1000 draws or more have every option and path. */
static inline void test_fuzz_end(const test_counts *counts, test_possible possible, long n)
{
    if (n < 0) return;
    for (int o = 0; o < counts->option_count && n >= 1000; o++) {
        long total = 0;
        for (int p = 0; p < counts->path_count; p++) total += counts->of[p][o];
        if (!test_that(total > 0)) test_detail("\"%s\" was never drawn", counts->options[o]);
    }
    for (int p = 0; p < counts->path_count && n >= 1000; p++)
        if (!test_that(counts->runs[p] > 0 || !possible(p, 0))) test_detail("path %s was never drawn", counts->paths[p]);
    test_finish();
    test_counts_print(counts, "drawn");
}

/* ---- Random numbers: splitmix64, the same everywhere ----------------------------------------------------------------- */

static inline uint64_t test_hash(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static inline uint64_t test_random(uint64_t *state)
{
    return test_hash((*state)++);
}

/* Uniform in [0, below). */
static inline int64_t test_below(uint64_t *state, int64_t below)
{
    return (int64_t)(test_random(state) >> 1) % below;
}

/* True once in `in` times. */
static inline bool test_chance(uint64_t *state, int64_t in)
{
    return test_below(state, in) == 0;
}

/* Uniform in [-1, 1). */
static inline double test_uniform(uint64_t *state)
{
    return (double)(test_random(state) >> 11) * 0x1p-52 - 1.0;
}

/* ---- Element types on the host, without CUDA's conversions ----------------------------------------------------------- */

/* T, and of outputs also e5m2, in the order of LK_DTYPE_*. */
enum { TEST_F32, TEST_F16, TEST_BF16, TEST_TYPES, TEST_E5M2 = TEST_TYPES };
static const char *const test_type_name[TEST_TYPES + 1] = {"f32", "f16", "bf16", "e5m2"};
static const int test_type_bytes[TEST_TYPES + 1] = {4, 2, 2, 1};

static inline uint32_t test_float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float test_bits_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* x rounded to nearest even, as the type's bits. */
static inline uint32_t test_encode(int type, float x)
{
    uint32_t bits = test_float_bits(x);
    const uint32_t sign = bits >> 16 & 0x8000u;
    if (type == TEST_F32) return bits;
    if (x != x) return 0x7fffu;
    if (type == TEST_BF16) return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    bits &= 0x7fffffffu;
    if (bits >= 0x47800000u) return sign | 0x7c00u;
    if (bits < 0x38800000u) return sign | (uint32_t)nearbyintf(fabsf(x) * 0x1p24f); /* subnormal in f16 */
    return sign | (bits + 0xfffu + (bits >> 13 & 1) - 0x38000000u) >> 13;
}

static inline float test_decode(int type, uint32_t bits)
{
    if (type == TEST_F32) return test_bits_float(bits);
    if (type == TEST_BF16) return test_bits_float(bits << 16);
    if (type == TEST_E5M2) bits <<= 8; /* the upper half of an f16 */
    const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return test_bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude >= 0x400u) return test_bits_float(sign | ((magnitude << 13) + 0x38000000u));
    return (sign ? -1.0f : 1.0f) * (float)magnitude * 0x1p-24f;
}

static inline void test_put(int type, void *elements, int64_t at, float x)
{
    const uint32_t bits = test_encode(type, x);
    if (type == TEST_F32) ((uint32_t *)elements)[at] = bits;
    else ((uint16_t *)elements)[at] = (uint16_t)bits;
}

static inline uint32_t test_get_bits(int type, const void *elements, int64_t at)
{
    if (type == TEST_E5M2) return ((const uint8_t *)elements)[at];
    return type == TEST_F32 ? ((const uint32_t *)elements)[at] : ((const uint16_t *)elements)[at];
}

static inline float test_get(int type, const void *elements, int64_t at)
{
    return test_decode(type, test_get_bits(type, elements, at));
}

/* Half a unit in the last place of x in the type; that of the subnormals for small x. */
static inline double test_half_ulp(int type, double x)
{
    static const int digits[] = {24, 11, 8, 3}, lowest[] = {-126, -14, -126, -14};
    int exponent;
    frexp(x, &exponent); /* |x| is in [2^(exponent - 1), 2^exponent) */
    exponent = x == 0 || exponent - 1 < lowest[type] ? lowest[type] : exponent - 1;
    return ldexp(0.5, exponent - digits[type] + 1);
}

/* What a gradient is rounded by, relative to it, where forward_backward of a loss under a softcap keeps codes: see lk_ce_encode. */
static inline double test_code_error(int type, int gradient_type, float softcap)
{
    if (type == TEST_F32 || softcap > 32) return 0;
    return gradient_type == TEST_E5M2 ? 0x1p-8 : gradient_type == TEST_BF16 ? 0x1p-10 : 0;
}

/* Checks a result of the type against the reference: NaN for NaN, the same infinity for an infinity, else within half an ulp
 * of the type and `slack`. What is too large for the type rounds to infinity, in e5m2 to the largest number. */
static inline bool test_near(int type, float got, double want, double slack)
{
    static const double overflow[TEST_TYPES] = {0x1.ffffffp127, 65520.0, 0x1.ffp127};
    if (want != want) return test_that(got != got);
    if (type == TEST_E5M2) want = fmin(fmax(want, -57344), 57344);
    if (type == TEST_E5M2 && isinf(got)) return test_that(false);
    if (isinf(want)) return test_that(got == want);
    if (isinf(got)) return test_that((got > 0) == (want > 0) && fabs(want) + slack >= overflow[type]);
    return test_within(fabs(got - want), test_half_ulp(type, want) + slack);
}

/* ---- Device memory --------------------------------------------------------------------------------------------------- */

typedef struct {
    unsigned char *device, *host, *back; /* all of it, zones included */
    size_t capacity, total, begin, bytes;
} test_buffer;

enum { TEST_ZONE = 256 };

/* Makes room for `bytes` bytes whose address is `off` past a multiple of 256, all of it poisoned on the host. */
static inline void test_buffer_size(test_buffer *b, size_t bytes, size_t off, int poison)
{
    b->begin = TEST_ZONE + off;
    b->bytes = bytes;
    b->total = b->begin + bytes + TEST_ZONE;
    if (b->total > b->capacity) {
        if (b->capacity) TEST_CUDA(cudaFree(b->device));
        free(b->host), free(b->back);
        b->capacity = b->total + b->total / 2;
        void *device = NULL;
        TEST_CUDA(cudaMalloc(&device, b->capacity));
        b->device = (unsigned char *)device;
        b->host = (unsigned char *)malloc(b->capacity);
        b->back = (unsigned char *)malloc(b->capacity);
    }
    memset(b->host, poison, b->total);
}

static inline void *test_buffer_device(const test_buffer *b) { return b->device + b->begin; }
static inline void *test_buffer_host(const test_buffer *b) { return b->host + b->begin; }
static inline void *test_buffer_back(const test_buffer *b) { return b->back + b->begin; }

/* Frees it; only large ones need it. */
static inline void test_buffer_free(test_buffer *b)
{
    if (b->capacity) TEST_CUDA(cudaFree(b->device));
    free(b->host), free(b->back);
    memset(b, 0, sizeof *b);
}

static inline void test_buffer_guard(const test_buffer *b, bool on)
{
    (void)b, (void)on;
#if TEST_ASAN
    const size_t end = b->begin + b->bytes;
    if (on) __asan_poison_memory_region(b->device, b->begin);
    if (on) __asan_poison_memory_region(b->device + end, b->capacity - end);
    if (!on) __asan_unpoison_memory_region(b->device, b->capacity);
#endif
}

static inline void test_buffer_upload(const test_buffer *b)
{
    test_buffer_guard(b, false);
    TEST_CUDA(cudaMemcpyAsync(b->device, b->host, b->total, cudaMemcpyHostToDevice, test.stream));
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    test_buffer_guard(b, true);
}

static inline void test_buffer_download(const test_buffer *b)
{
    test_buffer_guard(b, false);
    TEST_CUDA(cudaMemcpyAsync(b->back, b->device, b->total, cudaMemcpyDeviceToHost, test.stream));
    TEST_CUDA(cudaStreamSynchronize(test.stream));
}

static inline void test_buffer_accept(const test_buffer *b, int64_t at, int bytes)
{
    memcpy(b->back + b->begin + at * bytes, b->host + b->begin + at * bytes, (size_t)bytes);
}

static inline void test_buffer_accept_all(const test_buffer *b)
{
    if (b->bytes) memcpy(test_buffer_back(b), test_buffer_host(b), b->bytes);
}

/* The first byte that changed and was not accepted, relative to the data; INT64_MIN if there is none. */
static inline int64_t test_buffer_changed(const test_buffer *b)
{
    if (!memcmp(b->back, b->host, b->total)) return INT64_MIN;
    size_t i = 0;
    while (b->back[i] == b->host[i]) i++;
    return (int64_t)i - (int64_t)b->begin;
}

static inline bool test_buffer_untouched(const test_buffer *b, const char *name, const char *what)
{
    const int64_t changed = test_buffer_changed(b);
    if (test_that(changed == INT64_MIN)) return true;
    test_detail("%s: byte %lld of %s (%zu bytes) was %02x, is %02x", what, (long long)changed, name, b->bytes,
                b->host[b->begin + changed], b->back[b->begin + changed]);
    return false;
}

/* ---- Calls ------------------------------------------------------------------------------------------------------------- */

/* Whether a call succeeded; then waits for it. */
static inline bool test_launched(lk_status status, const char *what)
{
    if (!test_that(status == LK_OK)) {
        test_detail("status %d (%s): %s; %s", status, lk_status_string(status), lk_last_error(), what);
        return false;
    }
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    return true;
}

#define SPOIL(...) [](auto *a) { __VA_ARGS__; } /* of a call's struct, in tables of wrong calls */
#define MOVED(pointer, by) (pointer) = (decltype(pointer))((char *)(pointer) + (by)) /* by bytes */

/* Checks what a call returned, and if that is an error, that its sentence names the function and the field. Returns the
 * sentence, until the next one. op: the function's name up to the direction. */
static inline const char *test_expect(lk_status status, lk_status want, const char *field, const char *op, const char *direction,
                                      int type)
{
    static char said[512];
    char name[96], query[112]; /* the call's; a launch first asks for its workspace */
    snprintf(said, sizeof said, "%s", lk_last_error());
    snprintf(name, sizeof name, "%s_%s_%s", op, direction, test_type_name[type]);
    snprintf(query, sizeof query, "%s_%s_workspace_bytes_%s", op, direction, test_type_name[type]);
    if (!test_that(status == want))
        test_detail("%s, %s: status %s, want %s (%s)", name, field, lk_status_string(status), lk_status_string(want), said);
    if (!test_that(want == LK_OK || ((strstr(said, name) || strstr(said, query)) && strstr(said, field))))
        test_detail("%s: lk_last_error does not name %s: \"%s\"", name, field, said);
    return said;
}

/* Checks what its query answered, before which `asked` was TEST_NOT_ASKED, as it stays where the query fails. */
enum { TEST_NOT_ASKED = 12345 };
static inline void test_expect_query(lk_status answer, lk_status want, size_t asked, const char *field)
{
    if (!test_that(answer == want && (asked == TEST_NOT_ASKED) == (answer != LK_OK)))
        test_detail("%s: the workspace query says %s, want %s, and %zu bytes", field, lk_status_string(answer),
                    lk_status_string(want), asked);
}

/* A wrong call, for a table of them. */
template <class Args> struct test_bad_call {
    lk_status want, asked; /* of the call and of the query, which looks at no pointer */
    const char *field;     /* what lk_last_error must name */
    void (*spoil)(Args *a);
    bool forward = true, backward = true; /* the calls that refuse it; others take it */
};
enum { TEST_FORWARD, TEST_BACKWARD, TEST_BOTH, TEST_BETWEEN, TEST_FINISH }; /* directions, and calls of ranks */
template <class Args> static inline bool test_refused(const test_bad_call<Args> *bad, int direction)
{
    return (direction != TEST_BACKWARD && bad->forward) || (direction != TEST_FORWARD && bad->backward);
}

/* Checks, after a call that returned an error, that it wrote nothing into the buffer. */
static inline void test_expect_unwritten(lk_status status, const test_buffer *b, const char *name, const char *field)
{
    test_buffer_download(b);
    if (status) test_buffer_untouched(b, name, field);
}

/* Keeps the bits of an output in `kept`, or compares its rows with those that were kept. Then accepts them. */
static inline void test_settle(const test_buffer *b, unsigned char **kept, size_t *kept_bytes, bool keep, int64_t rows,
                               int64_t cols, int64_t stride, int bytes, const char *name, const char *what, const char *text)
{
    unsigned char *const back = (unsigned char *)test_buffer_back(b);
    if (keep) *kept = (unsigned char *)test_room(*kept, kept_bytes, b->bytes);
    if (!b->bytes) return; /* a tensor of no elements; may be NULL */
    if (keep) memcpy(*kept, back, b->bytes);
    for (int64_t row = 0; row < rows; row++) {
        const size_t at = (size_t)(row * stride * bytes);
        if (!keep && !test_that(!memcmp(*kept + at, back + at, (size_t)(cols * bytes))))
            test_detail("%s gives other bits for row %lld of %s; %s", what, (long long)row, name, text);
        for (int64_t c = 0; c < cols; c++) test_buffer_accept(b, row * stride + c, bytes);
    }
}

/* ---- An op's calls -------------------------------------------------------------------------------------------------------- */

/* What an op's test does with a problem. */
template <class Problem> struct test_op {
    const char *(*describe)(const Problem *);
    bool (*prepare)(const Problem *, int run); /* uploads inputs, and outputs poisoned otherwise in run 1; false: a check failed */
    lk_status (*launch)(const Problem *);
    void (*collect)(const Problem *); /* downloads all that was uploaded */
    void (*verify)(const Problem *);  /* holds the outputs against the reference */
    void (*settle)(const Problem *, bool keep, const char *what); /* keeps their bits, or compares them with those that were kept */
    void (*count)(const Problem *) = NULL; /* counts its path and options; it is prepared */
};

/* The checked call: twice, over different poison, against the reference and against each other. */
template <class Problem> static inline void test_twice(const test_op<Problem> &op, const Problem *p)
{
    for (int run = 0; run < 2; run++) {
        bool ran = op.prepare(p, run);
        if (run == 0 && op.count) op.count(p);
        ran = ran && test_launched(op.launch(p), op.describe(p));
        op.collect(p);
        if (!ran) return;
        if (run == 0) op.verify(p);
        op.settle(p, run == 0, "a second run");
    }
}

/* A problem whose plain call has kept its bits, captured once and replayed twice over poison: the same bits. */
template <class Problem> static inline void test_graph(const test_op<Problem> &op, const Problem *p)
{
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    op.prepare(p, 0);
    TEST_CUDA(cudaStreamBeginCapture(test.stream, cudaStreamCaptureModeThreadLocal));
    const lk_status status = op.launch(p);
    TEST_CUDA(cudaStreamEndCapture(test.stream, &graph));
    if (!test_that(status == LK_OK))
        test_detail("under capture: %s, %s; %s", lk_status_string(status), lk_last_error(), op.describe(p));
    TEST_CUDA(cudaGraphInstantiate(&replay, graph, 0));
    for (int run = 0; run < 2; run++) {
        if (run) op.prepare(p, 0);
        TEST_CUDA(cudaGraphLaunch(replay, test.stream));
        TEST_CUDA(cudaStreamSynchronize(test.stream));
        op.collect(p), op.settle(p, false, "a replay");
    }
    TEST_CUDA(cudaGraphExecDestroy(replay));
    TEST_CUDA(cudaGraphDestroy(graph));
}

/* Random draws; with counts or without. */
template <class Problem>
static inline void test_draws(Problem (*draw)(uint64_t seed), void (*check)(const Problem *), long n)
{
    for (long i = 0; i < n; i++) {
        const Problem p = draw(test_hash(test.fuzz_seed) + (uint64_t)i);
        check(&p);
    }
}

template <class Problem>
static inline void test_fuzz(Problem (*draw)(uint64_t seed), void (*check)(const Problem *), int full, int small)
{
    if (!test_begin("fuzz")) return;
    test_draws(draw, check, test.fuzz >= 0 ? test.fuzz : test_pick(full, small));
    test_finish();
}

/* ---- Tables of cases ---------------------------------------------------------------------------------------------------- */

typedef struct test_theme {
    const char *name;
    void (*run)(int type, int direction, int path);
    bool (*takes)(int direction, int path) = NULL; /* NULL: it is for all of them */
} test_theme;

/* Runs a table of cases for all types on a path: `forward f32 warp: lengths`. */
static inline void test_themes(const test_theme *themes, int count, int direction, int path, const char *direction_name,
                               const char *path_name)
{
    for (int type = 0; type < TEST_TYPES; type++)
        for (const test_theme *t = themes; t < themes + count; t++) {
            if (t->takes && !t->takes(direction, path)) continue;
            if (!test_begin("%s %s %s: %s", direction_name, test_type_name[type], path_name, t->name)) continue;
            t->run(type, direction, path);
            test_finish();
        }
}

/* A case of each type, `sums f16`; of each direction and type, `errors: forward f32`. */
static inline void test_of_types(const char *name, void (*run)(int type), int first = 0)
{
    for (int type = first; type < TEST_TYPES; type++)
        if (test_begin("%s %s", name, test_type_name[type])) run(type), test_finish();
}
static inline void test_of_directions(const char *name, void (*run)(int type, int direction), const char *const *directions,
                                      int count)
{
    for (int direction = 0; direction < count; direction++)
        for (int type = 0; type < TEST_TYPES; type++)
            if (test_begin("%s %s %s", name, directions[direction], test_type_name[type])) run(type, direction), test_finish();
}

/* ---- Columns split over ranks -------------------------------------------------------------------------------------------- */

/* Ranks are virtual: one process calls for one after another. A call that gathers is made for all ranks in rounds: in each its
 * collective returns what the ranks have sent so far, which is complete in the round after that of its first calls. */
typedef struct {
    int64_t cut[65];   /* rank i has columns cut[i] to cut[i + 1] - 1 */
    int count, acting; /* how many ranks there are; the one whose call runs */
    const void *user;  /* what a callback gets */
    char *table;       /* device memory: the blocks that the ranks have sent, in one collective after another */
    size_t table_bytes, block; /* bytes of it; of a block */
    int collective, collectives; /* the number of the call's next collective, and how many it has */
} test_ranks_state;

static test_ranks_state test_ranks;

/* Cuts `vocab` columns into uneven slices for ranks, some of them empty. */
static inline void test_cut_columns(int ranks, int64_t vocab, uint64_t seed)
{
    int64_t *const cut = test_ranks.cut;
    uint64_t random = seed + 77;
    for (int i = 1; i < ranks; i++) {
        const int64_t at = seed % 3 ? test_below(&random, vocab + 1) : vocab * i / ranks;
        int k = i;
        for (; k > 1 && cut[k - 1] > at; k--) cut[k] = cut[k - 1];
        cut[k] = at;
    }
    cut[0] = 0, cut[ranks] = vocab, test_ranks.count = ranks, test_ranks.collectives = 1;
}

/* Makes a rank the acting one, for its next call, and fills its lk_vocab_parallel. */
template <class Parallel> static inline void test_act_as(Parallel *v, int rank, const void *user)
{
    v->vocab_start = test_ranks.cut[rank], v->vocab_total = test_ranks.cut[test_ranks.count];
    v->rank = rank, v->ranks = test_ranks.count, v->user = (void *)(uintptr_t)user;
    test_ranks.user = user, test_ranks.acting = rank, test_ranks.collective = 0;
}

/* Fills the table, which grows, with 0xff. It has the blocks of all ranks; two more, of states that calls leave to backward; those
 * of the formula, a number of each row; and `more` bytes for the program, whose begin it returns. */
template <class Problem>
static inline char *test_fill_table(const Problem *p, int64_t rows, double (*others)(const Problem *, int64_t row), size_t block,
                                    size_t more)
{
    static float *numbers;
    static size_t room;
    const size_t at = block * (size_t)(p->ranks + 2), rest = (at + (size_t)rows * 4 + 255) / 256 * 256;
    test_cut_columns(p->ranks, p->vocab, p->seed);
    test_ranks.block = block;
    if (rest + more > test_ranks.table_bytes) {
        TEST_CUDA(cudaFree(test_ranks.table));
        TEST_CUDA(cudaMalloc(&test_ranks.table, test_ranks.table_bytes = 2 * (rest + more)));
    }
    numbers = (float *)test_room(numbers, &room, (size_t)rows * 4);
    for (int64_t row = 0; row < rows; row++) numbers[row] = (float)others(p, row);
    TEST_CUDA(cudaMemset(test_ranks.table, 0xff, rest + more));
    TEST_CUDA(cudaMemcpy(test_ranks.table + at, numbers, (size_t)rows * 4, cudaMemcpyHostToDevice));
    TEST_CUDA(cudaDeviceSynchronize()); /* test.stream does not wait for the default stream */
    return test_ranks.table + rest;
}

static inline char *test_states_of(int rank) { return test_ranks.table + (size_t)rank * test_ranks.block; }
/* What one or the other call leaves to backward, and behind both what the formula does. */
static inline float *test_left_states(int which) { return (float *)test_states_of(test_ranks.count + which); }

/* The collective. */
static inline lk_status test_gather(void *user, const void *send, void *receive, size_t bytes, cudaStream_t stream)
{
    test_ranks_state *const r = &test_ranks;
    if (!test_that(user == r->user && bytes == r->block && r->collective < r->collectives)) {
        test_detail("%zu bytes are gathered, not %zu, in collective %d of %d", bytes, r->block, r->collective, r->collectives);
        return (lk_status)77;
    }
    char *const table = r->table + (size_t)r->collective++ * (size_t)r->count * bytes;
    cudaMemcpyAsync(table + (size_t)r->acting * bytes, send, bytes, cudaMemcpyDeviceToDevice, stream);
    return cudaMemcpyAsync(receive, table, bytes * (size_t)r->count, cudaMemcpyDeviceToDevice, stream) ? (lk_status)77 : LK_OK;
}

/* The same for calls of one or of two collectives, in buffers: each rank's states, and the tables of what they have sent. */
static test_buffer test_states, test_tables;
static inline void test_poison_states(size_t block, int collectives, int run)
{
    const size_t all = block * (size_t)test_ranks.count;
    test_buffer_size(&test_states, all, 0, run ? 0xff : 0x5a), test_buffer_size(&test_tables, 2 * all, 16, run ? 0x5a : 0xff);
    test_buffer_upload(&test_states), test_buffer_upload(&test_tables);
    test_ranks.table = (char *)test_buffer_device(&test_tables), test_ranks.block = block, test_ranks.collectives = collectives;
}

template <class Args> static inline void test_give_states(Args *x, int rank)
{
    x->states = (char *)test_buffer_device(&test_states) + (size_t)rank * test_ranks.block, x->all_states = test_ranks.table;
}

/* The same call of all ranks. results: they write them. */
template <class Problem> using test_rank_call = lk_status (*)(const Problem *p, int call, int rank, bool results);
template <class Problem>
static inline lk_status test_call_ranks(const Problem *p, test_rank_call<Problem> call_rank, int call, bool results)
{
    lk_status status = LK_OK;
    for (int rank = 0; rank < test_ranks.count && !status; rank++) status = call_rank(p, call, rank, results);
    return status;
}

/* A problem's calls with these buffers. One that does not gather has three or four. */
template <class Problem>
static inline lk_status test_split_calls(const Problem *p, test_rank_call<Problem> call_rank, bool gathers)
{
    const bool results = p->direction != TEST_BACKWARD;
    const int rounds = test_ranks.collectives, first = p->direction == TEST_BOTH ? TEST_BOTH : TEST_FORWARD;
    lk_status status = LK_OK;
    for (int round = 0; round < (!gathers ? 1 : test_ranks.count > 1 ? rounds : 0) && !status; round++)
        status = test_call_ranks(p, call_rank, TEST_FORWARD, false);
    if (gathers && !status) status = test_call_ranks(p, call_rank, first, results);
    for (int round = 1; !gathers && round <= rounds && !status; round++) {
        const void *const sent = test_buffer_device(&test_states);
        cudaMemcpyAsync(test_ranks.table, sent, test_states.bytes, cudaMemcpyDeviceToDevice, test.stream);
        status = test_call_ranks(p, call_rank, round < rounds ? TEST_BETWEEN : TEST_FINISH, round == rounds && results);
    }
    return status || results ? status : test_call_ranks(p, call_rank, TEST_BACKWARD, false);
}

/* Callbacks that fail: their status is the call's. */
static inline lk_status test_broken_gather(void *, const void *, void *, size_t, cudaStream_t) { return (lk_status)77; }
static inline lk_status test_broken_reduce(void *, void *, int64_t, cudaStream_t) { return (lk_status)78; }

/* The sum of a tensor's parts, one of each rank, each `step` bytes behind the one before. */
template <class Layout> static inline void test_sum_parts(const Layout &l, const char *parts, size_t step, void *sums)
{
    for (int64_t row = 0; row < l.rows; row++)
        for (int64_t c = 0; c < l.cols; c++) {
            double sum = 0;
            for (int rank = 0; rank < test_ranks.count; rank++)
                sum += (double)test_get(l.type, parts + (size_t)rank * step, row * l.stride + c);
            test_put(l.type, sums, row * l.stride + c, (float)sum);
        }
}

/* The same of parts in device memory. */
template <class Layout> static inline void test_sum_device_parts(const Layout &l, const void *parts, size_t step, void *sums)
{
    const size_t bytes = (size_t)(l.rows * l.stride) * (size_t)test_type_bytes[l.type] + (size_t)(test_ranks.count - 1) * step;
    char *const host = (char *)malloc(bytes + 1);
    TEST_CUDA(cudaMemcpy(host, parts, bytes, cudaMemcpyDeviceToHost));
    test_sum_parts(l, host, step, sums);
    free(host);
}

/* Every third problem, by its seed: upstream_value, and losses that are added to others. */
template <class Problem> static inline float test_upstream_value(const Problem *p)
{
    return test_hash(p->seed + 5) % 3 == 0 ? -0.375f : 0.0f;
}
template <class Problem> static inline double test_upstream_times(const Problem *p) /* the factor that it means */
{
    const float value = test_upstream_value(p);
    return value == 0 ? 1 : (double)value;
}
template <class Problem> static inline bool test_adds_losses(const Problem *p)
{
    return p->direction != TEST_BACKWARD && test_hash(p->seed + 6) % 3 == 0;
}

/* What accumulate_loss adds to. t: the loss and the z-loss of a program, which lie beside each other, add to other numbers. */
static inline float test_loss_before(int64_t row, int t = 0) { return (float)(row % 7) - (t % 2 ? 3.25f : 2.75f); }
static inline void test_put_losses(const test_buffer *loss, int64_t rows, int t = 0)
{
    for (int64_t row = 0; row < rows; row++) ((float *)test_buffer_host(loss))[row] = test_loss_before(row, t);
}

/* A loss, beside what was there before. The program has adds_losses(p), and near(p, t, row, col, want, slack) for a number. */
template <class Problem> static inline void test_near_loss(const Problem *p, int t, int64_t row, double want, double slack)
{
    const double before = adds_losses(p) ? (double)test_loss_before(row, t) : 0;
    near(p, t, row, 0, want + before, slack + 0x1p-24 * fabs(before));
}

/* test_fill_losses writes what is there before to a buffer that is uploaded later; test_set_losses copies it there again, on
 * the stream, before each call that adds: of one rank behind another, in a graph too. */
static test_buffer test_losses;
static inline void test_fill_losses(int64_t rows, const test_buffer *loss)
{
    test_buffer_size(&test_losses, (size_t)rows * sizeof(float), 0, 0);
    test_put_losses(&test_losses, rows);
    test_buffer_upload(&test_losses);
    if (rows) memcpy(test_buffer_host(loss), test_buffer_host(&test_losses), test_losses.bytes);
}
static inline void test_set_losses(const test_buffer *loss)
{
    const void *const from = test_buffer_device(&test_losses);
    if (loss->bytes) cudaMemcpyAsync(test_buffer_device(loss), from, loss->bytes, cudaMemcpyDeviceToDevice, test.stream);
}

/* All ranks have the same bits: call it with each rank's floats, the first rank's first. Not while the stream is captured. */
static inline void test_same_on_ranks(const float *device, int64_t count, int rank)
{
    static float *first, *now;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const size_t bytes = (size_t)count * sizeof(float);
    if (cudaStreamIsCapturing(test.stream, &capture) || capture != cudaStreamCaptureStatusNone || count == 0) return;
    now = (float *)realloc(now, bytes);
    if (rank == 0) first = (float *)realloc(first, bytes);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    TEST_CUDA(cudaMemcpy(rank == 0 ? first : now, device, bytes, cudaMemcpyDeviceToHost));
    if (rank > 0 && !test_that(!memcmp(first, now, bytes))) test_detail("rank %d has other bits than rank 0", rank);
}

/* A tensor of a call: its field in the struct, the bytes of a row, and if it is an output its memory. */
typedef struct {
    void **field;
    size_t row_bytes;
    test_buffer *out;
} test_rows;

/* Random numbers of a type in a buffer. */
static inline void *test_invariant_input(test_buffer *b, int type, int64_t elements, uint64_t seed)
{
    test_buffer_size(b, (size_t)(elements * test_type_bytes[type]), 0, 0);
    for (int64_t i = 0; i < elements; i++) test_put(type, test_buffer_host(b), i, (float)(3 * test_uniform(&seed)));
    test_buffer_upload(b);
    return test_buffer_device(b);
}

/* batch_invariant: a row's results have the same bits in calls of other rows, at any place among them. launch() launches
 * the call. rows: the struct's. Every first row is a multiple of `step`. */
template <class Launch>
static inline void test_invariant(test_rows *tensors, int count, int64_t *rows, int64_t step, const char *what, Launch launch)
{
    const int64_t all = *rows, half = all / 2;
    const int64_t some[][2] = {{0, all}, {0, step}, {all - step, step}, {half, 2 * step}, {all / 3, half}, {step, all - step}};
    unsigned char *whole[16] = {};
    for (int i = 0; i < (int)(sizeof some / sizeof some[0]); i++) {
        const int64_t first = some[i][0] / step * step, n = some[i][1] / step * step;
        void *base[16] = {};
        for (int t = 0; t < count; t++) {
            base[t] = *tensors[t].field, *tensors[t].field = (char *)base[t] + (size_t)first * tensors[t].row_bytes;
            if (tensors[t].out) test_buffer_upload(tensors[t].out); /* poison */
        }
        *rows = n;
        const bool launched = test_launched(launch(), what);
        *rows = all;
        for (int t = 0; t < count; t++) {
            const test_buffer *const b = tensors[t].out;
            const size_t from = (size_t)first * tensors[t].row_bytes, bytes = (size_t)n * tensors[t].row_bytes;
            *tensors[t].field = base[t];
            if (!b || !launched) continue;
            test_buffer_download(b);
            const unsigned char *const back = (unsigned char *)test_buffer_back(b);
            if (i == 0) whole[t] = (unsigned char *)malloc(bytes), memcpy(whole[t], back, bytes);
            if (whole[t] && !test_that(!memcmp(whole[t] + from, back + from, bytes)))
                test_detail("%s: output %d of rows %lld to %lld of %lld has other bits", what, t, (long long)first,
                            (long long)(first + n - 1), (long long)all);
        }
    }
    for (int t = 0; t < count; t++) free(whole[t]);
}

/* A theme: others with columns split over 1, 2, 3 and 8 ranks; small shapes show it. --small leaves some out, which other types
 * have: it takes one of `every`. */
static int test_split_over; /* the ranks of new problems */
template <void (*themes)(int i, int type, int direction, int path), int every = 2>
static void test_split(int type, int direction, int path)
{
    static const int ranks[] = {1, 2, 3, 8};
    const bool small = test.small;
    test.small = true;
    for (int i = 0; i < LENGTH_OF(ranks); i++) {
        if (small && (i + type + direction + path) % every) continue;
        test_split_over = ranks[i];
        themes(i, type, direction, path);
    }
    test_split_over = 0, test.small = small;
}

/* Whether a call gathers by itself; forward does for some problems, and has three calls for the others. */
template <class Problem> static inline bool test_gathers(const Problem *p)
{
    return p->direction == TEST_BOTH || (p->direction == TEST_FORWARD && p->seed % 4 < 2);
}

/* A call of a rank that is wrong, and what its query says of it. */
template <class Args> struct test_bad_rank {
    int call;
    lk_status want, asked;
    const char *says; /* lk_last_error */
    void (*spoil)(Args *a);
};

/* Wrong numbers of a rank, where there are two ranks, as rows of a table of these. vocab: the field of a rank's columns. */
#define TEST_BAD_RANKS(call, vocab)                                                                                            \
    TEST_BAD_RANK(call, "parallel.vocab_total is 0; this call is for columns that are split over ranks", a->parallel = {}),    \
    TEST_BAD_RANK(call, "parallel.vocab_total is 0; this call", a->parallel.vocab_total = 0),                                  \
    TEST_BAD_RANK(call, "parallel.vocab_total is -1", a->parallel.vocab_total = -1),                                           \
    TEST_BAD_RANK(call, "parallel.vocab_start is", a->parallel.vocab_start = a->parallel.vocab_total - a->vocab + 1),          \
    TEST_BAD_RANK(call, "parallel.ranks is 0", a->parallel.ranks = 0),                                                         \
    TEST_BAD_RANK(call, "parallel.ranks is 65537", a->parallel.ranks = 65537),                                                 \
    TEST_BAD_RANK(call, "parallel.rank is 2", a->parallel.rank = 2),                                                           \
    TEST_BAD_RANK(call, "vocab is", a->vocab = a->parallel.vocab_total + 1),                                                   \
    TEST_BAD_RANK(call, "with parallel.ranks 1", a->parallel.ranks = 1; a->parallel.rank = 0; a->parallel.vocab_start = 0;     \
                  a->parallel.vocab_total = a->vocab + 1)
#define TEST_BAD_RANK(call, says, ...) {call, LK_ERR_SHAPE, LK_ERR_SHAPE, says, SPOIL(__VA_ARGS__)}

/* Makes call number i of a table. */
template <class Args>
static inline lk_status test_expect_rank(const test_bad_rank<Args> *table, int i, Args *x,
                                         lk_status (*call)(const Args *, cudaStream_t), lk_status (*query)(const Args *, size_t *))
{
    const test_bad_rank<Args> &bad = table[i];
    size_t asked = TEST_NOT_ASKED;
    bad.spoil(x);
    const lk_status status = call(x, test.stream);
    if (!test_that(status == bad.want && (!status || strstr(lk_last_error(), bad.says))))
        test_detail("case %d, %s: status %d, %s", i, bad.says, status, lk_last_error());
    const lk_status answer = query(x, &asked);
    if (!test_that(answer == bad.asked && (!answer || strstr(lk_last_error(), bad.says))))
        test_detail("case %d, %s: the query says %d, %s", i, bad.says, answer, lk_last_error());
    if (!test_that((asked == TEST_NOT_ASKED) == (answer != LK_OK))) test_detail("case %d: %zu bytes", i, asked);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    return status;
}

/* ---- A busy device ---------------------------------------------------------------------------------------------------- */

#if defined(__CUDACC__)

typedef struct {
    volatile int *flag;
} test_spin_args;

/* Holds its SM until the flag is set, a few seconds at most. */
static __global__ void __launch_bounds__(1024) test_spin_kernel(test_spin_args p)
{
    for (int i = 0; i < 1 << 21 && !*p.flag; i++) __nanosleep(1000);
}

typedef struct {
    int *flag;
    cudaStream_t spinning, setting;
} test_spin_state;

static test_spin_state test_spin;

/* Half of the SMs are held from here to test_release_sms. */
static inline void test_hold_sms(void)
{
    int smem = 0;
    TEST_CUDA(cudaDeviceGetAttribute(&smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    smem = smem / 10 * 7; /* an SM has room for one such block */
    if (!test_spin.flag) {
        TEST_CUDA(cudaMalloc((void **)&test_spin.flag, 4));
        TEST_CUDA(cudaStreamCreateWithFlags(&test_spin.spinning, cudaStreamNonBlocking));
        TEST_CUDA(cudaStreamCreateWithFlags(&test_spin.setting, cudaStreamNonBlocking));
        TEST_CUDA(cudaFuncSetAttribute(test_spin_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    }
    TEST_CUDA(cudaMemsetAsync(test_spin.flag, 0, 4, test_spin.setting));
    TEST_CUDA(cudaStreamSynchronize(test_spin.setting));
    const test_spin_args args = {test_spin.flag};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)test.sms / 2), config.blockDim = dim3(1024);
    config.dynamicSmemBytes = (size_t)smem, config.stream = test_spin.spinning;
    TEST_CUDA(cudaLaunchKernelEx(&config, test_spin_kernel, args));
}

/* Called when what ran beside has ended. */
static inline void test_release_sms(const char *what)
{
    if (!test_that(cudaStreamQuery(test_spin.spinning) == cudaErrorNotReady))
        test_detail("the spinning kernel ended before the op did; %s", what);
    TEST_CUDA(cudaMemsetAsync(test_spin.flag, 1, 4, test_spin.setting));
    TEST_CUDA(cudaStreamSynchronize(test_spin.spinning));
}

/* The bits of a call do not depend on how many SMs there are for it. */
template <class Problem> static inline void test_busy(const test_op<Problem> &op, const Problem *p)
{
    op.prepare(p, 0);
    test_hold_sms();
    test_launched(op.launch(p), op.describe(p));
    test_release_sms(op.describe(p));
    op.collect(p), op.settle(p, false, "a run beside a spinning kernel");
}

#endif

/* ---- Tensors of more than 2^31 elements ---------------------------------------------------------------------------------- */

/* Number i of a huge tensor, 0 to 255, the same on both sides. */
static inline __host__ __device__ int test_huge_number(int64_t i)
{
    uint64_t h = (uint64_t)i * 0x9e3779b97f4a7c15u;
    h ^= h >> 29;
    h *= 0xbf58476d1ce4e5b9u;
    return (int)(h >> 56);
}
/* The same as an element: a multiple of 1/32 in [-4, 4), exact in bf16. */
static inline __host__ __device__ float test_huge_value(int64_t i)
{
    return (float)test_huge_number(i) / 32.0f - 4.0f;
}
static inline __host__ __device__ int64_t test_huge_target(int64_t row, int64_t vocab)
{
    return (int64_t)((uint64_t)row * 0x9e3779b97f4a7c15u >> 11) % vocab;
}

typedef struct {
    lk_bf16 *x;
    int64_t n, from; /* element i is value from + i */
} test_huge_fill_args;

static __global__ void test_huge_fill_kernel(test_huge_fill_args p)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < p.n; i += (int64_t)gridDim.x * blockDim.x)
        lk_put(p.x + i, test_huge_value(p.from + i));
}

static inline void test_huge_fill(lk_bf16 *x, int64_t n, int64_t from)
{
    const test_huge_fill_args args = {x, n, from};
    TEST_CUDA(lk_launch(test_huge_fill_kernel, 4096, 256, 0, test.stream, args));
}

/* An element in device memory. */
static inline float test_huge_get(int type, const void *elements, int64_t at)
{
    uint32_t bits = 0;
    const size_t bytes = (size_t)test_type_bytes[type];
    TEST_CUDA(cudaMemcpy(&bits, (const char *)elements + (size_t)at * bytes, bytes, cudaMemcpyDeviceToHost));
    return test_decode(type, bits);
}

/* Device memory until test_huge_free. */
static void *test_huge_memory[16];
static inline void *test_huge_allocate(int64_t bytes)
{
    int i = 0;
    while (test_huge_memory[i]) i++;
    TEST_CUDA(cudaMalloc(&test_huge_memory[i], (size_t)(bytes ? bytes : 1)));
    return test_huge_memory[i];
}
static inline void test_huge_free(void)
{
    for (void *&memory : test_huge_memory) {
        if (memory) TEST_CUDA(cudaFree(memory));
        memory = NULL;
    }
}

/* The cases of these, which --small leaves out. */
#if defined(LK_SIMT)
#define TEST_HUGE(all) test_skip("huge", "more than 2^31 elements and a busy device need a GPU")
#else
#define TEST_HUGE(all) (test.small ? test_skip("huge", "left out of --small") : all())
#endif
#endif

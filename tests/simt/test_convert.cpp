// SPDX-License-Identifier: MIT
/*
The stand-ins' conversions between float and bf16, half and 8 bits, bit for bit against a reference: all values of bf16 and half to float, and floats to
each type. lk's own conversion to 8 bits, which code for a GPU before sm_89 has, is held against the same numbers.

    with CUDA's headers, every one of the 2^32 floats against CUDA's own host functions, in two objects since the headers exclude one another:
        g++ -std=c++17 -O2 -DSIMT_CONVERT_CUDA -I$CUDA_HOME/include -c tests/simt/test_convert.cpp -o cuda.o
        g++ -std=c++17 -O2 -DSIMT_CONVERT_ALL  -DLK_SIMT -I. -Itests/simt -c tests/simt/test_convert.cpp -o here.o
        g++ here.o cuda.o build/cpu-plain/simt/*.o -pthread -o test_convert
    without, a sample against arithmetic in double:
        g++ -std=c++17 -O2 -DLK_SIMT -I. -Itests/simt tests/simt/test_convert.cpp build/cpu-plain/simt/*.o -pthread -o test_convert
*/
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Each kind of conversion for `count` consecutive bit patterns; from CUDA's headers in one object, from the stand-ins in the other. */
#if defined(SIMT_CONVERT_CUDA)
#define CONVERT(name) extern "C" void cuda_##name
#else
#define CONVERT(name) static void here_##name
#endif

CONVERT(narrow)(uint32_t first, uint32_t count, uint16_t *bf16, uint16_t *half) {
    for (uint32_t i = 0; i < count; i++) {
        uint32_t bits = first + i;
        float value;
        memcpy(&value, &bits, sizeof value);
        bf16[i] = __bfloat16_as_ushort(__float2bfloat16_rn(value));
        half[i] = __half_as_ushort(__float2half_rn(value));
    }
}
CONVERT(eight)(uint32_t first, uint32_t count, uint8_t *e4m3, uint8_t *e5m2) {
    for (uint32_t i = 0; i < count; i++) {
        uint32_t bits = first + i;
        float value;
        memcpy(&value, &bits, sizeof value);
        e4m3[i] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
        e5m2[i] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2);
    }
}
CONVERT(widen)(uint16_t bits, uint32_t *from_bf16, uint32_t *from_half) {
    float value = __bfloat162float(__ushort_as_bfloat16(bits));
    memcpy(from_bf16, &value, sizeof value);
    value = __half2float(__ushort_as_half(bits));
    memcpy(from_half, &value, sizeof value);
}
/* The pairs and the constructors use the same code; once each is enough. */
CONVERT(pair)(float x, float y, uint16_t out[12]) {
    __nv_bfloat162 a = __floats2bfloat162_rn(x, y), b = __float22bfloat162_rn(make_float2(x, y));
    __half2 c = __floats2half2_rn(x, y), d = __float22half2_rn(make_float2(x, y));
    __nv_bfloat16 e = x, f = __float2bfloat16(__high2float(a));
    __half g = x, h = __float2half(__low2float(c));
    uint16_t all[12] = {__bfloat16_as_ushort(a.x), __bfloat16_as_ushort(a.y), __bfloat16_as_ushort(b.x), __bfloat16_as_ushort(b.y),
                        __half_as_ushort(c.x), __half_as_ushort(c.y), __half_as_ushort(d.x), __half_as_ushort(d.y),
                        __bfloat16_as_ushort(e), __bfloat16_as_ushort(f), __half_as_ushort(g), __half_as_ushort(h)};
    memcpy(out, all, sizeof all);
}

CONVERT(extremes)(uint16_t x, uint16_t y, uint16_t out[8]) {
    __nv_bfloat16 a = __ushort_as_bfloat16(x), b = __ushort_as_bfloat16(y);
    __half c = __ushort_as_half(x), d = __ushort_as_half(y);
    uint16_t all[8] = {__bfloat16_as_ushort(__hmax2(__halves2bfloat162(a, a), __halves2bfloat162(b, b)).y), __bfloat16_as_ushort(__hmin(a, b)),
                       __bfloat16_as_ushort(__hmax_nan(a, b)), __bfloat16_as_ushort(__hmin_nan(a, b)),
                       __half_as_ushort(__hmax2(__halves2half2(c, c), __halves2half2(d, d)).y), __half_as_ushort(__hmin(c, d)),
                       __half_as_ushort(__hmax_nan(c, d)), __half_as_ushort(__hmin_nan(c, d))};
    // CUDA's host form of the _nan kind takes either of two zeros; the device and the stand-ins keep +0 above -0.
    if (!((x | y) & 0x7fff)) all[2] = all[3] = all[6] = all[7] = 0;
    memcpy(out, all, sizeof all);
}

#if !defined(SIMT_CONVERT_CUDA)

#include <stdio.h>

#include <thread>
#include <vector>

#include "lk/lk_base.cuh"

#if defined(SIMT_CONVERT_ALL)

extern "C" void cuda_narrow(uint32_t first, uint32_t count, uint16_t *bf16, uint16_t *half);
extern "C" void cuda_eight(uint32_t first, uint32_t count, uint8_t *e4m3, uint8_t *e5m2);
extern "C" void cuda_widen(uint16_t bits, uint32_t *from_bf16, uint32_t *from_half);
extern "C" void cuda_extremes(uint16_t x, uint16_t y, uint16_t out[8]);
extern "C" void cuda_pair(float x, float y, uint16_t out[12]);
static const char reference[] = "CUDA's own headers, every float";
static uint64_t step = 1;

#else

/* The value in units of the target's last place, rounded by nearbyint in double, which is exact for every float. */
static uint16_t narrow_slowly(float value, int mantissa_bits, int least_exponent, int greatest_exponent) {
    uint16_t infinity = (uint16_t)((greatest_exponent - least_exponent + 2) << mantissa_bits);
    if (isnan(value)) return 0x7fff;
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double magnitude = fabs((double)value);
    if (magnitude == 0) return sign;
    if (isinf(magnitude)) return sign | infinity;
    int exponent = ilogb(magnitude);
    if (exponent < least_exponent) exponent = least_exponent;
    double units = nearbyint(ldexp(magnitude, mantissa_bits - exponent));
    double bits = units + ldexp(exponent - least_exponent, mantissa_bits);      // 2^mantissa_bits units are the hidden bit: exponent field 1
    return sign | (bits >= infinity ? infinity : (uint16_t)bits);
}
static uint32_t widen_slowly(uint16_t bits, int mantissa_bits, int least_exponent) {
    int field = (bits & 0x7fff) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1), exponents = 1 << (15 - mantissa_bits);
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, out;
    if (field == exponents - 1 && mantissa && mantissa_bits == 10) return 0x7fffffffu;         // CUDA keeps a bf16's NaN, not a half's
    if (field == exponents - 1) return sign | 0x7f800000u | (uint32_t)mantissa << (23 - mantissa_bits);
    float value = (float)(field ? ldexp(mantissa + (1 << mantissa_bits), field - 1 + least_exponent - mantissa_bits)
                                : ldexp(mantissa, least_exponent - mantissa_bits));
    memcpy(&out, &value, sizeof out);
    return sign | out;
}
static void cuda_narrow(uint32_t first, uint32_t count, uint16_t *bf16, uint16_t *half) {
    for (uint32_t i = 0; i < count; i++) {
        uint32_t bits = first + i;
        float value;
        memcpy(&value, &bits, sizeof value);
        bf16[i] = narrow_slowly(value, 7, -126, 127);
        half[i] = narrow_slowly(value, 10, -14, 15);
    }
}
/* The nearest of all finite numbers; of two, the one whose bits are even. */
static uint8_t eight_slowly(float value, int mantissa_bits, int bias, int most) {
    uint8_t sign = signbit(value) ? 0x80 : 0;
    double magnitude = fabs((double)value), least = INFINITY;
    int nearest = most;
    if (isnan(value)) return 0x7f;
    for (int bits = 0; bits <= most && !isinf(magnitude); bits++) {
        int field = bits >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
        double number = ldexp(field ? mantissa + (1 << mantissa_bits) : mantissa, (field ? field : 1) - bias - mantissa_bits);
        double distance = fabs(magnitude - number);
        if (distance < least || (distance == least && bits % 2 == 0)) least = distance, nearest = bits;
    }
    return (uint8_t)(sign | nearest);
}
static void cuda_eight(uint32_t first, uint32_t count, uint8_t *e4m3, uint8_t *e5m2) {
    for (uint32_t i = 0; i < count; i++) {
        uint32_t bits = first + i;
        float value;
        memcpy(&value, &bits, sizeof value);
        if (i % 64 == 0) e4m3[i] = eight_slowly(value, 3, 7, 0x7e), e5m2[i] = eight_slowly(value, 2, 15, 0x7b);
        else e4m3[i] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3), e5m2[i] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2);
    }
}
static void cuda_widen(uint16_t bits, uint32_t *from_bf16, uint32_t *from_half) {
    *from_bf16 = widen_slowly(bits, 7, -126);
    *from_half = widen_slowly(bits, 10, -14);
}
static void cuda_pair(float x, float y, uint16_t out[12]) {
    uint16_t b[2] = {narrow_slowly(x, 7, -126, 127), narrow_slowly(y, 7, -126, 127)}, h[2] = {narrow_slowly(x, 10, -14, 15), narrow_slowly(y, 10, -14, 15)};
    uint16_t all[12] = {b[0], b[1], b[0], b[1], h[0], h[1], h[0], h[1], b[0], b[1], h[0], h[0]};
    memcpy(out, all, sizeof all);
}
static uint16_t pick_slowly(uint16_t x, uint16_t y, uint16_t infinity, int larger, int nan_wins) {
    int x_nan = (x & 0x7fff) > infinity, y_nan = (y & 0x7fff) > infinity;
    if (x_nan || y_nan) return nan_wins || (x_nan && y_nan) ? 0x7fff : x_nan ? y : x;
    int a = x & 0x8000 ? -(x & 0x7fff) - 1 : x, b = y & 0x8000 ? -(y & 0x7fff) - 1 : y;    // the order of the numbers, -0 below +0
    return (a > b) == larger ? x : y;
}
static void cuda_extremes(uint16_t x, uint16_t y, uint16_t out[8]) {
    for (int i = 0; i < 8; i++) out[i] = i % 4 >= 2 && !((x | y) & 0x7fff) ? 0 : pick_slowly(x, y, i < 4 ? 0x7f80 : 0x7c00, i % 2 == 0, i % 4 >= 2);
}
static const char reference[] = "arithmetic in double, a sample of floats";
static uint64_t step = 61;        // of 4096 patterns: odd, so that every exponent and all kinds of low bits are there

#endif

enum { CHUNK = 4096 };

/* What differs of a helper's chunks: to bf16, to half, to 8 bits, and lk's own to 8 bits. */
static void compare(uint64_t first_chunk, uint64_t every, uint64_t *bad) {
    std::vector<uint16_t> a(CHUNK), b(CHUNK), c(CHUNK), d(CHUNK);
    std::vector<uint8_t> e(4 * CHUNK);
    for (int i = 0; i < 4; i++) bad[i] = 0;
    for (uint64_t chunk = first_chunk; chunk < (1ull << 32) / CHUNK; chunk += every) {
        here_narrow((uint32_t)(chunk * CHUNK), CHUNK, a.data(), b.data());
        cuda_narrow((uint32_t)(chunk * CHUNK), CHUNK, c.data(), d.data());
        here_eight((uint32_t)(chunk * CHUNK), CHUNK, e.data(), e.data() + CHUNK);
        cuda_eight((uint32_t)(chunk * CHUNK), CHUNK, e.data() + 2 * CHUNK, e.data() + 3 * CHUNK);
        for (int i = 0; i < CHUNK; i++) {
            uint32_t bits = (uint32_t)(chunk * CHUNK) + (uint32_t)i;
            float value;
            memcpy(&value, &bits, sizeof value);
            bad[2] += e[i] != e[2 * CHUNK + i] || e[CHUNK + i] != e[3 * CHUNK + i];
            bad[3] += lk_fp8_bits<3>(value) != e[2 * CHUNK + i] || lk_fp8_bits<2>(value) != e[3 * CHUNK + i];
        }
        if (!memcmp(a.data(), c.data(), CHUNK * 2) && !memcmp(b.data(), d.data(), CHUNK * 2)) continue;
        for (int i = 0; i < CHUNK; i++) bad[0] += a[i] != c[i], bad[1] += b[i] != d[i];
    }
}

int main(void) {
    int passed = 0, failed = 0;
    if (getenv("SIMT_CONVERT_SAMPLE")) step = 61;
    printf("against %s%s\n", reference, getenv("SIMT_CONVERT_SAMPLE") ? ", a sample" : "");
    uint64_t bad[2][4];
    std::thread helper(compare, step, 2 * step, bad[1]);
    compare(0, 2 * step, bad[0]);
    helper.join();
    uint64_t wide[2] = {0, 0};
    for (uint32_t bits = 0; bits < 65536; bits++) {
        uint32_t a, b, c, d;
        here_widen((uint16_t)bits, &a, &b);
        cuda_widen((uint16_t)bits, &c, &d);
        wide[0] += a != c;
        wide[1] += b != d;
    }
    uint64_t picked = 0;
    for (uint32_t x = 0; x < 65536; x++) {
        const uint16_t others[] = {0, 0x8000, (uint16_t)x, (uint16_t)(x ^ 0x8000), (uint16_t)(x + 1), 0x3c00, 0xbf80, 0x7c00, 0xfc00, 0x7f80, 0xff80, 0x7e00, 0xffff};
        for (uint16_t y : others) {
            uint16_t a[8], b[8];
            here_extremes((uint16_t)x, y, a);
            cuda_extremes((uint16_t)x, y, b);
            picked += memcmp(a, b, sizeof a) != 0;
        }
    }
    uint16_t here[12], there[12];
    here_pair(1.0f / 3, -65519.0f, here);
    cuda_pair(1.0f / 3, -65519.0f, there);
    const struct { const char *name; uint64_t bad; } cases[] = {
        {"float to bf16", bad[0][0] + bad[1][0]}, {"float to half", bad[0][1] + bad[1][1]}, {"bf16 to float", wide[0]}, {"half to float", wide[1]},
        {"float to 8 bits", bad[0][2] + bad[1][2]}, {"lk_fp8_bits", bad[0][3] + bad[1][3]}, {"minimum and maximum", picked},
        {"pairs and constructors", (uint64_t)(memcmp(here, there, sizeof here) != 0)}};
    for (auto &c : cases) {
        printf("%-4s  %-24s %llu differ\n", c.bad ? "FAIL" : "ok", c.name, (unsigned long long)c.bad);
        c.bad ? failed++ : passed++;
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}

#endif

// SPDX-License-Identifier: MIT
// Stand-in for CUDA's cuda_fp16.h: storage and conversions of half. Arithmetic on it, except for minimum and maximum, does not compile: this
// project computes in float.
#ifndef SIMT_CUDA_FP16_H
#define SIMT_CUDA_FP16_H

#include <string.h>

#include "simt_half.h"
#include "vector_types.h"

struct __half_raw { unsigned short x; };
struct __attribute__((aligned(4))) __half2_raw { unsigned short x, y; };

/* Round to nearest, ties to even; too large becomes infinite; every NaN becomes 0x7FFF, as on the device. */
static inline unsigned short simt_float_to_half_bits(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    unsigned sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x47800000) return (unsigned short)(sign | 0x7c00);        // 65536 and up
    unsigned mantissa, shift;
    if (magnitude >= 0x38800000) {                                              // normal: rebias by 112, drop 13 bits
        mantissa = magnitude - 0x38000000;
        shift = 13;
    } else {                                                                    // subnormal: units of 2^-24
        if (magnitude < 0x33000000) return (unsigned short)sign;                // below half a unit
        mantissa = (magnitude & 0x7fffff) | 0x800000;
        shift = 126 - (magnitude >> 23);
    }
    // The carry of rounding runs into the exponent as it should, up to infinity.
    unsigned rounded = (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
    return (unsigned short)(sign | rounded);
}
static inline float simt_half_bits_to_float(unsigned short half_bits) {
    unsigned sign = (unsigned)(half_bits & 0x8000) << 16, exponent = half_bits >> 10 & 31, mantissa = half_bits & 0x3ff, bits;
    if (exponent == 31) bits = mantissa ? 0x7fffffff : sign | 0x7f800000;      // one NaN for all, as on the device
    else if (exponent) bits = sign | (exponent + 112) << 23 | mantissa << 13;
    else {
        float magnitude = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &magnitude, sizeof bits);
        bits |= sign;
    }
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

struct __attribute__((aligned(2))) __half {
    unsigned short __x;
    __half() = default;
    __half(const __half_raw &raw) : __x(raw.x) {}
    __half(float value) : __x(simt_float_to_half_bits(value)) {}
    operator __half_raw() const { return __half_raw{__x}; }
    operator float() const { return simt_half_bits_to_float(__x); }
};
struct __attribute__((aligned(4))) __half2 {
    __half x, y;
    __half2() = default;
    __half2(const __half &a, const __half &b) : x(a), y(b) {}
};
typedef __half half;
typedef __half2 half2;

__half operator+(const __half &, const __half &) = delete;
__half operator-(const __half &, const __half &) = delete;
__half operator*(const __half &, const __half &) = delete;
__half operator/(const __half &, const __half &) = delete;

static inline __half __ushort_as_half(unsigned short bits) { return __half(__half_raw{bits}); }
static inline unsigned short __half_as_ushort(__half value) { return value.__x; }
static inline __half __float2half(float value) { return __half(value); }
static inline __half __float2half_rn(float value) { return __half(value); }
static inline float __half2float(__half value) { return (float)value; }
static inline __half2 __floats2half2_rn(float x, float y) { return __half2(__half(x), __half(y)); }
static inline __half2 __float22half2_rn(float2 v) { return __floats2half2_rn(v.x, v.y); }
static inline __half2 __float2half2_rn(float v) { return __floats2half2_rn(v, v); }
static inline float2 __half22float2(__half2 v) { return make_float2((float)v.x, (float)v.y); }
static inline __half2 __halves2half2(__half x, __half y) { return __half2(x, y); }
static inline __half2 __half2half2(__half v) { return __half2(v, v); }
static inline __half2 make_half2(__half x, __half y) { return __half2(x, y); }
static inline __half __low2half(__half2 v) { return v.x; }
static inline __half __high2half(__half2 v) { return v.y; }
static inline float __low2float(__half2 v) { return (float)v.x; }
static inline float __high2float(__half2 v) { return (float)v.y; }

SIMT_HALF_MIN_MAX(__half, __half2, __half_raw)

#endif

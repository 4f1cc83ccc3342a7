// SPDX-License-Identifier: MIT
// Stand-in for CUDA's cuda_bf16.h: storage and conversions of bfloat16. Arithmetic on it, except for minimum and maximum, does not compile: this
// project computes in float.
#ifndef SIMT_CUDA_BF16_H
#define SIMT_CUDA_BF16_H

#include <string.h>

#include "simt_half.h"
#include "vector_types.h"

struct __nv_bfloat16_raw { unsigned short x; };
struct __attribute__((aligned(4))) __nv_bfloat162_raw { unsigned short x, y; };

/* Round to nearest, ties to even; every NaN becomes 0x7FFF, as on the device. */
static inline unsigned short simt_float_to_bf16_bits(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
static inline float simt_bf16_bits_to_float(unsigned short half_bits) {
    unsigned bits = (unsigned)half_bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

struct __attribute__((aligned(2))) __nv_bfloat16 {
    unsigned short __x;
    __nv_bfloat16() = default;
    __nv_bfloat16(const __nv_bfloat16_raw &raw) : __x(raw.x) {}
    __nv_bfloat16(float value) : __x(simt_float_to_bf16_bits(value)) {}
    operator __nv_bfloat16_raw() const { return __nv_bfloat16_raw{__x}; }
    operator float() const { return simt_bf16_bits_to_float(__x); }
};
struct __attribute__((aligned(4))) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(const __nv_bfloat16 &a, const __nv_bfloat16 &b) : x(a), y(b) {}
};
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

__nv_bfloat16 operator+(const __nv_bfloat16 &, const __nv_bfloat16 &) = delete;
__nv_bfloat16 operator-(const __nv_bfloat16 &, const __nv_bfloat16 &) = delete;
__nv_bfloat16 operator*(const __nv_bfloat16 &, const __nv_bfloat16 &) = delete;
__nv_bfloat16 operator/(const __nv_bfloat16 &, const __nv_bfloat16 &) = delete;

static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16(__nv_bfloat16_raw{bits}); }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.__x; }
static inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
static inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
static inline float __bfloat162float(__nv_bfloat16 value) { return (float)value; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return __nv_bfloat162(__nv_bfloat16(x), __nv_bfloat16(y)); }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
static inline __nv_bfloat162 __float2bfloat162_rn(float v) { return __floats2bfloat162_rn(v, v); }
static inline float2 __bfloat1622float2(__nv_bfloat162 v) { return make_float2((float)v.x, (float)v.y); }
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162(x, y); }
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 v) { return __nv_bfloat162(v, v); }
static inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162(x, y); }
static inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
static inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
static inline float __low2float(__nv_bfloat162 v) { return (float)v.x; }
static inline float __high2float(__nv_bfloat162 v) { return (float)v.y; }

SIMT_HALF_MIN_MAX(__nv_bfloat16, __nv_bfloat162, __nv_bfloat16_raw)

#endif

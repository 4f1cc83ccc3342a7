// SPDX-License-Identifier: MIT
// Stand-in for CUDA's cuda_fp8.h: conversions of floats to 8 bits, and of 8 bits to floats.
#ifndef SIMT_CUDA_FP8_H
#define SIMT_CUDA_FP8_H

#include <math.h>

#include "vector_types.h"

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
typedef enum { __NV_NOSAT, __NV_SATFINITE } __nv_saturation_t;
typedef enum { __NV_E4M3, __NV_E5M2 } __nv_fp8_interpretation_t;

/* Of a number that is not negative: its sign, exponent and mantissa count up as an integer does. */
static inline float simt_fp8_magnitude(int bits, __nv_fp8_interpretation_t kind) {
    int mantissa_bits = kind == __NV_E4M3 ? 3 : 2, bias = kind == __NV_E4M3 ? 7 : 15;
    int field = bits >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1), hidden = 1 << mantissa_bits;
    return ldexpf((float)(field ? mantissa + hidden : mantissa), (field ? field : 1) - bias - mantissa_bits);
}
static inline float simt_fp8_to_float(__nv_fp8_storage_t value, __nv_fp8_interpretation_t kind) {
    int bits = value & 0x7f;
    float sign = value & 0x80 ? -1.0f : 1.0f;
    if (kind == __NV_E4M3 ? bits == 0x7f : bits > 0x7c) return NAN;
    if (kind == __NV_E5M2 && bits == 0x7c) return sign * INFINITY;
    return sign * simt_fp8_magnitude(bits, kind);
}
/* Round to nearest, ties to even; NaN becomes 0x7F, as on the device. */
static inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t saturate, __nv_fp8_interpretation_t kind) {
    int mantissa_bits = kind == __NV_E4M3 ? 3 : 2, bias = kind == __NV_E4M3 ? 7 : 15, most = kind == __NV_E4M3 ? 0x7e : 0x7b;
    if (x != x) return 0x7f;
    unsigned char sign = signbit(x) ? 0x80 : 0;
    float size = fabsf(x);
    if (size == 0) return sign;
    int exponent = isinf(size) ? 128 : ilogbf(size), bits = most + 1;
    if (exponent < 1 - bias) exponent = 1 - bias;
    if (exponent <= 127) {      // in units of the last place, which are exact in double; 2^mantissa_bits units are the hidden bit
        double units = nearbyint(ldexp((double)size, mantissa_bits - exponent)) + ldexp(exponent - 1 + bias, mantissa_bits);
        if (units <= most) bits = (int)units;
    }
    if (bits > most) bits = saturate == __NV_SATFINITE ? most : kind == __NV_E4M3 ? 0x7f : 0x7c;
    return (unsigned char)(sign | bits);
}
static inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t saturate, __nv_fp8_interpretation_t kind) {
    return (unsigned short)(__nv_cvt_float_to_fp8(x.x, saturate, kind) | __nv_cvt_float_to_fp8(x.y, saturate, kind) << 8);
}

#endif

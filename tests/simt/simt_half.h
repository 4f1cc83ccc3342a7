// SPDX-License-Identifier: MIT
// What bfloat16 and half have in common, for the stand-ins cuda_bf16.h and cuda_fp16.h: minimum and maximum. They are exact, so the
// bits are those of the device.
#ifndef SIMT_HALF_H
#define SIMT_HALF_H

/* Of a NaN and a number the result is the number, or NaN in the _nan forms. A NaN result is 0x7FFF. +0 is above -0. */
#define SIMT_HALF_MIN_MAX(half_t, half2_t, raw_t)                                                                                            \
    static inline bool __hisnan(half_t a) { return (float)a != (float)a; }                                                                   \
    static inline half_t simt_pick(half_t a, half_t b, bool larger, bool nan_wins) {                                                         \
        if (__hisnan(a) || __hisnan(b)) {                                                                                                    \
            half_t other = __hisnan(a) ? b : a;                                                                                              \
            return nan_wins || __hisnan(other) ? half_t(raw_t{0x7fff}) : other;                                                              \
        }                                                                                                                                    \
        bool above = (float)a == (float)b ? a.__x < b.__x : (float)a > (float)b;                                                             \
        return above == larger ? a : b;                                                                                                      \
    }                                                                                                                                        \
    static inline half_t __hmax(half_t a, half_t b) { return simt_pick(a, b, true, false); }                                                 \
    static inline half_t __hmin(half_t a, half_t b) { return simt_pick(a, b, false, false); }                                                \
    static inline half_t __hmax_nan(half_t a, half_t b) { return simt_pick(a, b, true, true); }                                              \
    static inline half_t __hmin_nan(half_t a, half_t b) { return simt_pick(a, b, false, true); }                                             \
    static inline half2_t __hmax2(half2_t a, half2_t b) { return half2_t(__hmax(a.x, b.x), __hmax(a.y, b.y)); }                              \
    static inline half2_t __hmin2(half2_t a, half2_t b) { return half2_t(__hmin(a.x, b.x), __hmin(a.y, b.y)); }                              \
    static inline half2_t __hmax2_nan(half2_t a, half2_t b) { return half2_t(__hmax_nan(a.x, b.x), __hmax_nan(a.y, b.y)); }                  \
    static inline half2_t __hmin2_nan(half2_t a, half2_t b) { return half2_t(__hmin_nan(a.x, b.x), __hmin_nan(a.y, b.y)); }

#endif

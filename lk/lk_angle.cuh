// SPDX-License-Identifier: MIT
/* lk_angle.cuh - angles s theta of whole positions s, exact for large ones: as parts of a turn in fixed point, which lose whole
 * turns by wrapping. md_lrpe_cosine and rope stand on it.
 *
 *     const uint32_t phase = lk_phase(lk_make_turn(__float_as_uint(theta)), s);
 *     const float phi = (float)(int)phase * LK_PHASE_UNIT;      // within 3.0e-7 of s theta modulo 2 pi, for |theta| <= 2^24
 *
 * Needs: lk_base.cuh, lk_ptx.cuh.
 */
#ifndef LK_ANGLE_CUH
#define LK_ANGLE_CUH

#include "lk_base.cuh"

#if defined(__CUDACC__) || defined(LK_SIMT)

#define LK_PHASE_UNIT 0x1.921fb6p-30f /* 2 pi / 2^32 */

/* theta in turns (1 turn is 2 pi), without whole ones: frac(theta / 2 pi) 2^64 = high 2^32 + low, with low signed. */
typedef struct {
    uint32_t high;
    int low;
} lk_turn;

/* The lower word of (high 2^32 + low) >> (shift modulo 32). */
LK_DEVICE uint32_t lk_turn_funnel(uint32_t low, uint32_t high, int shift)
{
    return (uint32_t)(((uint64_t)high << 32 | low) >> (shift & 31));
}

/* frac(theta / 2 pi) 2^64 of a float's bits, exact except for the last bit, for |theta| < 2^24. theta is mantissa 2^-shift with
 * 24 bits of mantissa, and 1 / 2 pi is three words. Words 2 to 0 of their product, 86 bits, are floor(mantissa / 2 pi 2^64).
 * They are shifted right by `shift`. Beyond 2^24 they are shifted left, and each doubling of theta loses a bit. */
LK_DEVICE lk_turn lk_make_turn(uint32_t theta)
{
    const uint32_t mantissa = (theta & 0x7fffff) | 0x800000; /* below 2^-126 too: such a theta gives no angle at any position */
    const uint64_t lower = (uint64_t)mantissa * 0x9391054au + __umulhi(mantissa, 0x7f09d5f4u);
    const uint64_t upper = (uint64_t)mantissa * 0x28be60dbu + (lower >> 32);
    const uint32_t word_0 = (uint32_t)lower, word_1 = (uint32_t)upper, word_2 = (uint32_t)(upper >> 32); /* word_2 < 2^22 */
    const int right = 150 - (int)(theta >> 23 & 0xff), shift = min(max(right, 0), 95);
    const uint32_t a = shift < 32 ? word_0 : shift < 64 ? word_1 : word_2, b = shift < 32 ? word_1 : shift < 64 ? word_2 : 0;
    uint64_t turn = (uint64_t)lk_turn_funnel(b, shift < 32 ? word_2 : 0, shift) << 32 | lk_turn_funnel(a, b, shift);
    turn <<= min(max(-right, 0), 63);
    const uint64_t sign = (uint64_t)((int64_t)(int)theta >> 63);
    turn = (turn ^ sign) - sign;
    const int low = (int)(uint32_t)turn;
    return {(uint32_t)(turn >> 32) - (uint32_t)(low >> 31), low};
}

/* The angle s theta in 2^-32 turns, rounded to nearest. Whole turns wrap around. Read as an int it is from -1/2 to 1/2 of a turn;
 * times LK_PHASE_UNIT it is in radians. */
LK_DEVICE uint32_t lk_phase(lk_turn turn, int s)
{
    return (uint32_t)s * turn.high + (uint32_t)((uint64_t)((int64_t)s * turn.low + 0x80000000) >> 32);
}

#endif /* CUDA or the simulator */
#endif

/* How a number is stored: FP32, BF16, or exact in two halves (fp32 bits = (bf16 bits << 16) + low); one element or two neighbours at a time. */
#ifndef NUMBER_FORMS_H
#define NUMBER_FORMS_H

#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs are read with the first element in the low half"
#endif

#define INLINE static inline __attribute__((always_inline))

enum { FP32 = 0, BF16 = 1, SPLIT = 2, INT8 = 3 };

INLINE int bytes(int form) { return form == FP32 ? 4 : form == INT8 ? 1 : 2; }
INLINE float as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
INLINE uint32_t as_bits(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }
INLINE uint32_t number_bits(float f) { return f != f ? 0x7fc00000u : as_bits(f); } /* so that no NaN wraps round when it is rounded */
INLINE float with_sign(float sign, float positive) { return as_float((as_bits(sign) & 0x80000000u) | as_bits(positive)); }
INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

INLINE uint32_t nearest_bf16(float f) { /* in the upper half; ties to even, as torch's cast */
    uint32_t b = number_bits(f);
    return b + 0x7fffu + ((b >> 16) & 1);
}

INLINE uint32_t high_half(float f) { return number_bits(f) + 0x8000u; } /* in the upper half; ties away from zero */

INLINE float exact(uint32_t high, int32_t low) {
    /* A weight that someone zeroed beside us (a pruning mask) may keep a negative low half; zero minus something would read as NaN. */
    uint32_t sum = high + (uint32_t)low;
    return as_float((int32_t)(sum ^ high) < 0 ? high : sum);
}

INLINE float load(int form, const void *values, const uint16_t *low, int64_t i) {
    if (form == FP32) return ((const float *)values)[i];
    uint32_t high = (uint32_t)((const uint16_t *)values)[i] << 16;
    return form == SPLIT ? exact(high, (int16_t)low[i]) : as_float(high);
}

INLINE void store(int form, void *values, uint16_t *low, int64_t i, float f) {
    if (form == FP32) {
        ((float *)values)[i] = f;
    } else if (form == SPLIT) {
        low[i] = (uint16_t)number_bits(f);
        ((uint16_t *)values)[i] = (uint16_t)(high_half(f) >> 16);
    } else {
        ((uint16_t *)values)[i] = (uint16_t)(nearest_bf16(f) >> 16);
    }
}

/* The same for neighbours 2j and 2j + 1 in one word, which comes apart by a shift and a mask, without moves between vector lanes. */
typedef uint32_t two_of_16 __attribute__((aligned(2), may_alias));
typedef uint16_t two_of_8 __attribute__((aligned(1), may_alias));
struct pair { float first, second; };

INLINE uint32_t upper_halves(uint32_t first, uint32_t second) { return first >> 16 | (second & 0xffff0000u); }

INLINE struct pair load_pair(int form, const void *values, const uint16_t *low, int64_t j) {
    if (form == FP32) return (struct pair){((const float *)values)[2 * j], ((const float *)values)[2 * j + 1]};
    uint32_t both = ((const two_of_16 *)values)[j], first = both << 16, second = both & 0xffff0000u;
    if (form == BF16) return (struct pair){as_float(first), as_float(second)};
    uint32_t lows = ((const two_of_16 *)low)[j];
    return (struct pair){exact(first, (int32_t)(lows << 16) >> 16), exact(second, (int32_t)lows >> 16)};
}

INLINE void store_pair(int form, void *values, uint16_t *low, int64_t j, struct pair f) {
    if (form == FP32) {
        ((float *)values)[2 * j] = f.first;
        ((float *)values)[2 * j + 1] = f.second;
    } else if (form == SPLIT) {
        ((two_of_16 *)low)[j] = (number_bits(f.first) & 0xffffu) | number_bits(f.second) << 16;
        ((two_of_16 *)values)[j] = upper_halves(high_half(f.first), high_half(f.second));
    } else {
        ((two_of_16 *)values)[j] = upper_halves(nearest_bf16(f.first), nearest_bf16(f.second));
    }
}

#endif

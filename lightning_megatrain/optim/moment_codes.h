/* Moments smaller than FP32: 8-bit codes, and the noise that rounds to them and to BF16. moments.py has the same in torch. */
#ifndef MOMENT_CODES_H
#define MOMENT_CODES_H

#include "number_forms.h"

#define BLOCK 256 /* elements that share one scale in 8-bit moments */

/* The 8-bit codes: the top bits of the float 1 + x, x = moment / unit, with the moment's sign, as telephones code sound. Three bits
 * follow the leading one, so codes lie 6 to 12 % apart, and evenly below the unit. m: sign and 4 bits of exponent; v: 5. The unit is
 * scale 2^-16 and scale 2^-32, the scale a power of two that makes the largest of the block fit. */

#define ONE 0x3f800000u
#define UNIT_M 0x1p-16f
#define UNIT_V 0x1p-32f

INLINE float block_scale(uint32_t most) { /* most: bits of the largest magnitude; as integers NaN > inf > finite, so none is lost */
    uint32_t b = as_bits(as_float(most) * 0x1.12p0f) & 0x7fffffffu;
    if (b >= 0x7f000000u) return as_float(0x7fc00000u); /* not finite, or its power of two is not */
    float scale = as_float((b + 0x7fffffu) & 0x7f800000u);
    return scale > 0x1p-90f ? scale : 0x1p-90f;
}

/* 1 + x is a BF16 number. */
INLINE uint16_t expand_m(int8_t code) { return (uint16_t)((((uint32_t)code << 4) & 0x87f0u) + (ONE >> 16)); }
INLINE uint16_t expand_v(uint8_t code) { return (uint16_t)(((uint32_t)code << 4) + (ONE >> 16)); }
INLINE float decode_m(float expanded, float unit) { return (expanded - with_sign(expanded, 1.0f)) * unit; }
INLINE float decode_v(float expanded, float unit) { return (expanded - 1.0f) * unit; }

/* Of the two codes around a value one is drawn, so that the value is right on average. `noise` has ONE subtracted. The code comes in the
 * top byte; what is below it means nothing. A finite value's use the sign and 27 bits, of another the whole block is overwritten. */
INLINE uint32_t encode_m(float m, float per_unit, uint32_t noise) {
    float x = m * per_unit;
    uint32_t drawn = as_bits(x + with_sign(x, 1.0f)) + noise;
    return drawn << 4 | (drawn & 0x80000000u);
}

INLINE uint32_t encode_v(float v, float per_unit, uint32_t noise) { return (as_bits(v * per_unit + 1.0f) + noise) << 4; }
INLINE uint32_t upper_codes(uint32_t first, uint32_t second) { return first >> 8 | (second & 0xff000000u); } /* in the upper half */
INLINE uint8_t not_zero(uint8_t code) { return code > 1 ? code : 1; } /* v is divided by */

/* The noise. Element i's 32 random bits are place[i % BLOCK] ^ block[i / BLOCK], both hashes: they do not depend
 * on the order of work, cost one operation, and any two elements' are independent, which is all that a mean and a variance need. BF16
 * takes 16 of them for m and the other 16 for v; INT8 takes 20 each, of which the last 8 of v's are the first of m's. */

struct noise { uint32_t m[2][BLOCK / 2], v[2][BLOCK / 2]; }; /* of all first, of all second neighbours of a block */

INLINE uint32_t noise_m(int form, uint32_t bits) { return bits & (form == BF16 ? 0xffffu : 0xfffffu); }
INLINE uint32_t noise_v(int form, uint32_t bits) { return bits >> (form == BF16 ? 16 : 12); }

INLINE uint32_t hash(uint32_t seed, uint32_t index) {
    uint32_t x = index ^ seed;
    x ^= x >> 16; x *= 0x7feb352du;
    x ^= x >> 15; x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

#endif

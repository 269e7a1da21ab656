/* One AdamW (or Adam) step over parameters in host memory, in one pass.
 *
 * A step is a list of tensors. It is cut into pieces of PIECE elements; every calling thread takes pieces from one shared counter until
 * none are left. Elements never meet, so the result does not depend on how many threads call.
 *
 * The common forms are one loop. The others take BLOCK elements at a time: decoded to FP32, updated, and encoded back while they lie in
 * the first-level cache.
 *
 * The arithmetic is defined operation by operation in IEEE single precision (build with -ffp-contract=off, without -ffast-math), so all
 * clones, all compilers, and arithmetic.py (the same steps in torch) agree bit for bit. No Python or torch headers are needed.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 256           /* elements that share one scale in 8-bit moments */
#define PIECE ((int64_t)1 << 18)
#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(NO_CLONES)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

enum { FP32 = 0, BF16 = 1, SPLIT = 2, INT8 = 3 };

/* One step of one group; mirrored field by field by arithmetic.py. */
struct scalars {
    float grad_scale, l2, keep, step_size, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps;
};

/* Mirrored field by field by kernel.py. */
struct tensor {
    int64_t n;
    void *param;            /* float, or uint16_t for BF16 and SPLIT */
    uint16_t *low;          /* SPLIT: the low half of each FP32 value */
    const void *grad;       /* float or uint16_t */
    void *m, *v;            /* float, uint16_t, or int8_t and uint8_t */
    float *m_scale, *v_scale;   /* INT8: one per BLOCK */
    float *v_max;           /* AMSGrad, or NULL */
    uint16_t *copy;         /* BF16 working copy, or NULL */
    int32_t param_form, grad_form, moment_form;
    uint32_t seed;          /* of this step's stochastic rounding */
    struct scalars scalars;
};

INLINE float as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
INLINE uint32_t as_bits(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }

/* 32 random bits from the element's index: a hash, so that they do not depend on the order of work. */
INLINE uint32_t random_bits(uint32_t seed, uint32_t index) {
    uint32_t x = index ^ seed;
    x ^= x >> 16; x *= 0x7feb352du;
    x ^= x >> 15; x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

/* ---- BF16 ---- */

INLINE uint16_t nearest_bf16(float f) { /* ties to even, as torch's cast */
    uint32_t b = as_bits(f), rounded = (b + 0x7fffu + ((b >> 16) & 1)) >> 16;
    return (uint16_t)((b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

INLINE uint16_t stochastic_bf16(float f, uint32_t noise16) {
    uint32_t b = as_bits(f);
    return (uint16_t)((b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (b + noise16) >> 16);
}

/* ---- exact masters in two halves: fp32 bits = (bf16 bits << 16) + low, in 16-bit steps that vectorize twice as wide ---- */

INLINE float join(uint16_t high, uint16_t low) {
    /* A weight that someone zeroed beside us (a pruning mask) may keep a negative low half; zero minus something would read as NaN. */
    uint16_t negative = (uint16_t)((int16_t)low >> 15), zero = (high & 0x7fffu) == 0 ? 0xffffu : 0;
    uint16_t h = (uint16_t)(high + (negative & ~zero)), l = (uint16_t)(low & ~(negative & zero));
    return as_float(((uint32_t)h << 16) | l);
}

INLINE uint16_t high_half(float f) {
    uint16_t h = (uint16_t)(as_bits(f) >> 16), round_up = (uint16_t)((as_bits(f) >> 15) & 1);
    return (uint16_t)(h + ((h & 0x7fffu) == 0x7fffu ? 0 : round_up)); /* a NaN must not wrap round to zero */
}

INLINE uint16_t low_half(float f) { return (uint16_t)as_bits(f); }

/* ---- 8-bit moments: m = scale (c/128)^2 with c's sign, v = scale (c/256)^4; scales are powers of two ---- */

INLINE float block_scale(int n, const float *restrict x, float headroom, float least) {
    uint32_t most = 0;
    for (int i = 0; i < n; i++) {
        uint32_t b = as_bits(x[i]) & 0x7fffffffu; /* as integers NaN > inf > finite: none is lost */
        most = b > most ? b : most;
    }
    uint32_t b = as_bits(as_float(most) * headroom) & 0x7fffffffu;
    if (b >= 0x7f000000u) return as_float(0x7fc00000u); /* not finite, or its power of two is not */
    float scale = as_float((b + 0x7fffffu) & 0x7f800000u);
    return scale > least ? scale : least;
}

INLINE void decode_m(int n, float *restrict m, const int8_t *restrict code, float scale) {
    const float unit = scale * 0x1p-14f;
    for (int i = 0; i < n; i++) {
        float c = (float)code[i];
        m[i] = c * fabsf(c) * unit;
    }
}

INLINE void decode_v(int n, float *restrict v, const uint8_t *restrict code, float scale) {
    const float unit = scale * 0x1p-32f;
    for (int i = 0; i < n; i++) {
        float c = (float)code[i], square = c * c;
        v[i] = square * square * unit;
    }
}

/* Of the two codes around a value one is drawn, so that the value is right on average. */
INLINE float encode_m(int n, int8_t *restrict code, const float *restrict m, const uint32_t *restrict noise) {
    const float scale = block_scale(n, m, 0x1.041p0f, 0x1p-100f);
    if (!(scale < INFINITY)) { memset(code, 1, (size_t)n); return scale; }
    const float to_code = 0x1p14f / scale;
    for (int i = 0; i < n; i++) {
        float y = fabsf(m[i]) * to_code, q = (float)(int32_t)sqrtf(y);
        float u = (float)(int32_t)(noise[i] & 0xffffu) * 0x1p-16f;
        int32_t c = (int32_t)q + (q * q + u * (q + q + 1.0f) < y);
        c = c > 127 ? 127 : c;
        code[i] = (int8_t)((int32_t)as_bits(m[i]) < 0 ? -c : c);
    }
    return scale;
}

INLINE float encode_v(int n, uint8_t *restrict code, const float *restrict v, const uint32_t *restrict noise) {
    const float scale = block_scale(n, v, 0x1.041p0f, 0x1p-90f);
    if (!(scale < INFINITY)) { memset(code, 1, (size_t)n); return scale; }
    const float to_code = 0x1p32f / scale;
    for (int i = 0; i < n; i++) {
        float y = v[i] * to_code, q = (float)(int32_t)sqrtf(sqrtf(y)), q1 = q + 1.0f;
        float lower = (q * q) * (q * q), upper = (q1 * q1) * (q1 * q1);
        float u = (float)(int32_t)(noise[i] >> 16) * 0x1p-16f;
        int32_t c = (int32_t)q + (lower + u * (upper - lower) < y);
        int32_t least = v[i] > 0.0f; /* what is not zero must not become zero: it is divided by */
        c = c > 255 ? 255 : c < least ? least : c;
        code[i] = (uint8_t)c;
    }
    return scale;
}

/* ---- the update ---- */

struct moments { float m, v; };

INLINE struct moments average(const struct scalars *k, float g, float m, float v) {
    m = m + (g - m) * k->one_minus_beta1;
    v = v * k->beta2 + g * g * k->one_minus_beta2;
    return (struct moments){m, v};
}

INLINE float descend(const struct scalars *k, float p, float m, float v) {
    return p * k->keep - k->step_size * (m / (sqrtf(v) * k->inv_sqrt_correction2 + k->eps));
}

INLINE float load(int form, const void *restrict values, const uint16_t *restrict low, int64_t i) {
    if (form == FP32) return ((const float *)values)[i];
    uint16_t half = ((const uint16_t *)values)[i];
    return form == SPLIT ? join(half, low[i]) : as_float((uint32_t)half << 16);
}

INLINE void store(int form, void *restrict values, uint16_t *restrict low, int64_t i, float f) {
    if (form == FP32) {
        ((float *)values)[i] = f;
    } else if (form == SPLIT) {
        low[i] = low_half(f);
        ((uint16_t *)values)[i] = high_half(f);
    } else {
        ((uint16_t *)values)[i] = nearest_bf16(f);
    }
}

/* The common cases, FP32 moments and decoupled decay, in one loop; the forms are constants where this is inlined. */
INLINE void step_fused(const struct tensor *tensor, int64_t begin, int64_t end, int param_form, int grad_form, int has_copy) {
    const struct tensor copied = *tensor, *t = &copied; /* so that no store can alias a constant */
    void *restrict param = t->param;
    const void *restrict grad = t->grad;
    float *restrict m = t->m, *restrict v = t->v;
    uint16_t *restrict low = t->low, *restrict copy = t->copy;
    for (int64_t i = begin; i < end; i++) {
        float p = load(param_form, param, low, i);
        struct moments now = average(&t->scalars, load(grad_form, grad, 0, i) * t->scalars.grad_scale, m[i], v[i]);
        p = descend(&t->scalars, p, now.m, now.v);
        m[i] = now.m;
        v[i] = now.v;
        store(param_form, param, low, i, p);
        if (has_copy) copy[i] = nearest_bf16(p);
    }
}

/* Every case: BLOCK elements are decoded, updated and encoded in loops of their own. */
INLINE void step_block(const struct tensor *tensor, int64_t o, int n) {
    const struct tensor copied = *tensor, *t = &copied;
    float p[BLOCK], g[BLOCK], m[BLOCK], v[BLOCK];
    uint32_t noise[BLOCK];
    const int64_t block = o / BLOCK;

#define EACH for (int i = 0; i < n; i++)
    if (t->param_form == FP32) EACH p[i] = load(FP32, t->param, 0, o + i);
    else if (t->param_form == SPLIT) EACH p[i] = load(SPLIT, t->param, t->low, o + i);
    else EACH p[i] = load(BF16, t->param, 0, o + i);
    if (t->grad_form == FP32) EACH g[i] = load(FP32, t->grad, 0, o + i) * t->scalars.grad_scale;
    else EACH g[i] = load(BF16, t->grad, 0, o + i) * t->scalars.grad_scale;
    if (t->moment_form == INT8) {
        decode_m(n, m, (const int8_t *)t->m + o, t->m_scale[block]);
        decode_v(n, v, (const uint8_t *)t->v + o, t->v_scale[block]);
    } else if (t->moment_form == BF16) {
        EACH m[i] = load(BF16, t->m, 0, o + i);
        EACH v[i] = load(BF16, t->v, 0, o + i);
    } else {
        EACH m[i] = load(FP32, t->m, 0, o + i);
        EACH v[i] = load(FP32, t->v, 0, o + i);
    }

    if (t->scalars.l2 != 0.0f) EACH g[i] = g[i] + p[i] * t->scalars.l2;
    EACH {
        struct moments now = average(&t->scalars, g[i], m[i], v[i]);
        m[i] = now.m;
        v[i] = now.v;
    }
    if (t->v_max) {
        float *restrict most = t->v_max + o;
        EACH most[i] = v[i] <= most[i] ? most[i] : v[i];
        EACH p[i] = descend(&t->scalars, p[i], m[i], most[i]);
    } else {
        EACH p[i] = descend(&t->scalars, p[i], m[i], v[i]);
    }

    if (t->param_form == FP32) EACH store(FP32, t->param, 0, o + i, p[i]);
    else if (t->param_form == SPLIT) EACH store(SPLIT, t->param, t->low, o + i, p[i]);
    else EACH store(BF16, t->param, 0, o + i, p[i]);
    if (t->copy) EACH store(BF16, t->copy, 0, o + i, p[i]);
    if (t->moment_form == FP32) {
        EACH store(FP32, t->m, 0, o + i, m[i]);
        EACH store(FP32, t->v, 0, o + i, v[i]);
        return;
    }
    EACH noise[i] = random_bits(t->seed, (uint32_t)(o + i));
    if (t->moment_form == INT8) {
        t->m_scale[block] = encode_m(n, (int8_t *)t->m + o, m, noise);
        t->v_scale[block] = encode_v(n, (uint8_t *)t->v + o, v, noise);
    } else {
        uint16_t *restrict m16 = (uint16_t *)t->m + o, *restrict v16 = (uint16_t *)t->v + o;
        EACH m16[i] = stochastic_bf16(m[i], noise[i] & 0xffffu);
        EACH v16[i] = stochastic_bf16(v[i], noise[i] >> 16);
    }
#undef EACH
}

CLONES static void step_range(const struct tensor *t, int64_t begin, int64_t end) {
    if (t->moment_form == FP32 && !t->v_max && t->scalars.l2 == 0.0f && t->param_form != BF16) {
        const int split = t->param_form == SPLIT, half = t->grad_form == BF16;
        if (split && half) step_fused(t, begin, end, SPLIT, BF16, 0);
        else if (split) step_fused(t, begin, end, SPLIT, FP32, 0);
        else if (t->copy && half) step_fused(t, begin, end, FP32, BF16, 1);
        else if (t->copy) step_fused(t, begin, end, FP32, FP32, 1);
        else if (half) step_fused(t, begin, end, FP32, BF16, 0);
        else step_fused(t, begin, end, FP32, FP32, 0);
        return;
    }
    for (int64_t o = begin; o < end; o += BLOCK) step_block(t, o, end - o < BLOCK ? (int)(end - o) : BLOCK);
}

/* Called by each thread of a step with the same counter, which starts at zero. */
void megatrain_host_adamw(const struct tensor *tensors, int64_t count, int64_t *next) {
    int64_t first = 0; /* the first piece of tensor k */
    int64_t piece = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
    for (int64_t k = 0; k < count; k++) {
        const int64_t pieces = (tensors[k].n + PIECE - 1) / PIECE;
        while (piece < first + pieces) {
            int64_t begin = (piece - first) * PIECE, end = begin + PIECE;
            step_range(&tensors[k], begin, end < tensors[k].n ? end : tensors[k].n);
            piece = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        }
        first += pieces;
    }
}

/* So that a library of another version is refused, not misread. */
int64_t megatrain_host_adamw_abi(void) { return (int64_t)sizeof(struct tensor); }

/* One AdamW (or Adam) step over parameters in host memory, in one pass.
 *
 * A step is a list of tensors. It is cut into pieces of PIECE elements; every calling thread takes pieces from one shared counter until
 * none are left. Elements never meet, so the result does not depend on how many threads call.
 *
 * Work goes in blocks, in loops whose forms are constants for the common cases. The others, and the last elements of a tensor, are staged:
 * copied into a block of FP32 weights and gradients in the first-level cache, updated there, and copied back.
 *
 * The arithmetic is defined operation by operation in IEEE single precision (build with -ffp-contract=off, without -ffast-math), so all
 * clones, all compilers, and arithmetic.py (the same steps in torch) agree bit for bit. No Python or torch headers are needed.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "moment_codes.h"
#include "number_forms.h"

#define PIECE ((int64_t)1 << 18)
#define FORMAT ((int64_t)2) /* as kernel.py has it */
#if defined(__clang__) /* no array of a step overlaps another */
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(NO_CLONES)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

/* One step of one group; mirrored field by field by scalars.py. */
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

/* ---- the update; forms are constants where these are inlined ---- */

struct moments { float m, v; };

INLINE struct moments average(const struct scalars *k, float g, float m, float v) {
    m = m + (g * k->grad_scale - m) * k->one_minus_beta1;
    v = v * k->beta2 + (g * k->grad_scale) * (g * k->grad_scale) * k->one_minus_beta2;
    return (struct moments){m, v};
}

INLINE float denominator(const struct scalars *k, float v) { return sqrtf(v) * k->inv_sqrt_correction2 + k->eps; }
INLINE float descend(const struct scalars *k, float p, float direction) { return p * k->keep - k->step_size * direction; }

/* Elements o to o + BLOCK with FP32 moments: one loop, at the memory's speed. */
INLINE void step_fp32(const struct tensor *tensor, int64_t o, int param_form, int grad_form, int has_copy, int has_max) {
    const struct tensor copied = *tensor, *t = &copied; /* so that no store can alias a constant */
    const struct scalars *k = &t->scalars;
    float *m = t->m, *v = t->v;
    INDEPENDENT for (int64_t i = o; i < o + BLOCK; i++) {
        struct moments now = average(k, load(grad_form, t->grad, 0, i), m[i], v[i]);
        m[i] = now.m;
        v[i] = now.v;
        if (has_max) now.v = t->v_max[i] = now.v <= t->v_max[i] ? t->v_max[i] : now.v;
        float p = descend(k, load(param_form, t->param, t->low, i), now.m / denominator(k, now.v));
        store(param_form, t->param, t->low, i, p);
        if (has_copy) store(BF16, t->copy, 0, i, p);
    }
}

#define EACH_PAIR INDEPENDENT for (int j = 0; j < BLOCK / 2; j++)

/* What the loops over a block hand on, in the first-level cache: of first, then of second neighbours. */
struct scratch {
    float m[2][BLOCK / 2], v[2][BLOCK / 2], below[2][BLOCK / 2];
    two_of_16 expanded_m[BLOCK / 2], expanded_v[BLOCK / 2]; /* INT8 */
    uint32_t codes_m[BLOCK / 2], codes_v[BLOCK / 2];        /* INT8 */
    struct noise noise;                                     /* the same for all blocks */
};

/* The same with moments in BF16 or INT8, which arithmetic bounds: in pairs, and in loops short enough for the processor to look ahead. The
 * encoding runs beside the root and the weights beside the quotient, which keep only the divider busy. Nothing is prefetched: the
 * processor's own prefetching does better. */
INLINE void step_small(const struct tensor *tensor, int64_t o, int param_form, int grad_form, int has_copy, int moment_form,
                       struct scratch *at, uint32_t key) {
    const struct tensor copied = *tensor, *t = &copied;
    const struct scalars *k = &t->scalars;
    const uint32_t key_m = noise_m(moment_form, key), key_v = noise_v(moment_form, key);
    two_of_16 *m16 = (two_of_16 *)t->m + o / 2, *v16 = (two_of_16 *)t->v + o / 2;
    two_of_8 *m8 = (two_of_8 *)t->m + o / 2, *v8 = (two_of_8 *)t->v + o / 2;
    float (*m)[BLOCK / 2] = at->m, (*v)[BLOCK / 2] = at->v, (*below)[BLOCK / 2] = at->below;
    const struct noise *noise = &at->noise;
    uint32_t most_m = 0, most_v = 0; /* from here on for INT8 only */
    float unit_m = 0, unit_v = 0, per_unit_m = 0, per_unit_v = 0;

    if (moment_form == INT8) {
        unit_m = t->m_scale[o / BLOCK] * UNIT_M, unit_v = t->v_scale[o / BLOCK] * UNIT_V;
        INDEPENDENT for (int i = 0; i < BLOCK; i++) {
            ((uint16_t *)at->expanded_m)[i] = expand_m(((int8_t *)m8)[i]);
            ((uint16_t *)at->expanded_v)[i] = expand_v(((uint8_t *)v8)[i]);
        }
        m16 = at->expanded_m, v16 = at->expanded_v;
    }
    EACH_PAIR {
        struct pair g = load_pair(grad_form, t->grad, 0, o / 2 + j), old_m = load_pair(BF16, m16, 0, j), old_v = load_pair(BF16, v16, 0, j);
        if (moment_form == INT8) {
            old_m = (struct pair){decode_m(old_m.first, unit_m), decode_m(old_m.second, unit_m)};
            old_v = (struct pair){decode_v(old_v.first, unit_v), decode_v(old_v.second, unit_v)};
        }
        struct moments a = average(k, g.first, old_m.first, old_v.first), b = average(k, g.second, old_m.second, old_v.second);
        m[0][j] = a.m, m[1][j] = b.m, v[0][j] = a.v, v[1][j] = b.v;
        most_m = larger(larger(most_m, as_bits(a.m) & 0x7fffffffu), as_bits(b.m) & 0x7fffffffu);
        most_v = larger(larger(most_v, as_bits(a.v)), as_bits(b.v)); /* never below zero */
    }
    if (moment_form == INT8) {
        per_unit_m = 1.0f / ((t->m_scale[o / BLOCK] = block_scale(most_m)) * UNIT_M);
        per_unit_v = 1.0f / ((t->v_scale[o / BLOCK] = block_scale(most_v)) * UNIT_V);
    }
    EACH_PAIR {
        const float m0 = m[0][j], m1 = m[1][j], v0 = v[0][j], v1 = v[1][j];
        const uint32_t for_m0 = noise->m[0][j] ^ key_m, for_m1 = noise->m[1][j] ^ key_m;
        const uint32_t for_v0 = noise->v[0][j] ^ key_v, for_v1 = noise->v[1][j] ^ key_v;
        below[0][j] = denominator(k, v0), below[1][j] = denominator(k, v1);
        if (moment_form == BF16) {
            m16[j] = upper_halves(number_bits(m0) + for_m0, number_bits(m1) + for_m1);
            v16[j] = upper_halves(number_bits(v0) + for_v0, number_bits(v1) + for_v1);
        } else {
            at->codes_m[j] = upper_codes(encode_m(m0, per_unit_m, for_m0), encode_m(m1, per_unit_m, for_m1));
            at->codes_v[j] = upper_codes(encode_v(v0, per_unit_v, for_v0), encode_v(v1, per_unit_v, for_v1));
        }
    }
    EACH_PAIR {
        struct pair p = load_pair(param_form, t->param, t->low, o / 2 + j);
        p = (struct pair){descend(k, p.first, m[0][j] / below[0][j]), descend(k, p.second, m[1][j] / below[1][j])};
        store_pair(param_form, t->param, t->low, o / 2 + j, p);
        if (has_copy) store_pair(BF16, t->copy, 0, o / 2 + j, p);
    }
    if (moment_form == INT8) {
        EACH_PAIR m8[j] = (uint16_t)(at->codes_m[j] >> 16), v8[j] = (uint16_t)(at->codes_v[j] >> 16);
        INDEPENDENT for (int i = 0; i < BLOCK; i++) ((uint8_t *)v8)[i] = not_zero(((uint8_t *)v8)[i]);
        if (!(per_unit_m > 0.0f)) memset(m8, 1, BLOCK); /* not finite: decodes to NaN as a whole */
        if (!(per_unit_v > 0.0f)) memset(v8, 1, BLOCK);
    }
}

/* Whole blocks from begin to end, of a common form. The first is number `block` of its tensor. */
CLONES static void step_common(const struct tensor *t, int64_t begin, int64_t end, uint32_t block) {
    const uint32_t key = hash(t->seed, BLOCK), less = t->moment_form == INT8 ? ONE : 0;
    struct scratch at __attribute__((aligned(64)));
    if (t->moment_form != FP32) {
        for (uint32_t i = 0; i < BLOCK; i++) {
            at.noise.m[i & 1][i / 2] = noise_m(t->moment_form, hash(t->seed, i)) - less;
            at.noise.v[i & 1][i / 2] = noise_v(t->moment_form, hash(t->seed, i)) - less;
        }
    }
#define BLOCKS for (int64_t o = begin; o < end; o += BLOCK, block++)
#define STEP(param, grad, has_copy)                                                                               \
    if (t->moment_form == FP32) BLOCKS step_fp32(t, o, param, grad, has_copy, 0);                                 \
    else if (t->moment_form == BF16) BLOCKS step_small(t, o, param, grad, has_copy, BF16, &at, hash(key, block)); \
    else BLOCKS step_small(t, o, param, grad, has_copy, INT8, &at, hash(key, block))
    const int split = t->param_form == SPLIT, half = t->grad_form == BF16;
    if (t->v_max) { BLOCKS step_fp32(t, o, FP32, FP32, 0, 1); }
    else if (split && half) { STEP(SPLIT, BF16, 0); }
    else if (split) { STEP(SPLIT, FP32, 0); }
    else if (t->copy && half) { STEP(FP32, BF16, 1); }
    else if (t->copy) { STEP(FP32, FP32, 1); }
    else if (half) { STEP(FP32, BF16, 0); }
    else { STEP(FP32, FP32, 0); }
}

/* n elements from o, at most a block, of any form. */
CLONES static void step_staged(const struct tensor *t, int64_t o, int n) {
    float p[BLOCK] = {0}, g[BLOCK] = {0}, m[BLOCK] = {0}, v[BLOCK] = {0}, v_max[BLOCK] = {0};
    struct tensor staged = *t;
    staged.param = p, staged.grad = g, staged.m = m, staged.v = v, staged.copy = 0;
    staged.param_form = staged.grad_form = FP32;
    if (t->moment_form == INT8) staged.m_scale = t->m_scale + o / BLOCK, staged.v_scale = t->v_scale + o / BLOCK;
    staged.scalars.grad_scale = 1.0f;
    const int64_t from = o * bytes(t->moment_form), size = n * bytes(t->moment_form);
#define EACH for (int i = 0; i < n; i++)
    if (t->param_form == FP32) EACH p[i] = load(FP32, t->param, 0, o + i);
    else if (t->param_form == SPLIT) EACH p[i] = load(SPLIT, t->param, t->low, o + i);
    else EACH p[i] = load(BF16, t->param, 0, o + i);
    if (t->grad_form == FP32) EACH g[i] = load(FP32, t->grad, 0, o + i) * t->scalars.grad_scale;
    else EACH g[i] = load(BF16, t->grad, 0, o + i) * t->scalars.grad_scale;
    if (t->scalars.l2 != 0.0f) EACH g[i] = g[i] + p[i] * t->scalars.l2;
    memcpy(m, (char *)t->m + from, size), memcpy(v, (char *)t->v + from, size);
    if (t->v_max) staged.v_max = memcpy(v_max, t->v_max + o, n * sizeof(float));

    step_common(&staged, 0, BLOCK, (uint32_t)(o / BLOCK));

    if (t->param_form == FP32) EACH store(FP32, t->param, 0, o + i, p[i]);
    else if (t->param_form == SPLIT) EACH store(SPLIT, t->param, t->low, o + i, p[i]);
    else EACH store(BF16, t->param, 0, o + i, p[i]);
    if (t->copy) EACH store(BF16, t->copy, 0, o + i, p[i]);
    memcpy((char *)t->m + from, m, size), memcpy((char *)t->v + from, v, size);
    if (t->v_max) memcpy(t->v_max + o, v_max, n * sizeof(float));
#undef EACH
}

static void step_range(const struct tensor *t, int64_t begin, int64_t end) {
    const int common = !t->v_max && t->scalars.l2 == 0.0f && t->param_form != BF16;
    const int64_t whole = common ? end - (end - begin) % BLOCK : begin;
    if (whole > begin) step_common(t, begin, whole, (uint32_t)(begin / BLOCK));
    for (int64_t o = whole; o < end; o += BLOCK) step_staged(t, o, end - o < BLOCK ? (int)(end - o) : BLOCK);
}

/* How this thread treats numbers below the least normal one: set to IEEE's way, which a program may have changed (set_flush_denormal) on
 * some threads and not on others. */
#if defined(__x86_64__)
typedef uint32_t float_mode;
INLINE float_mode current_mode(void) { float_mode mode; __asm__ volatile("stmxcsr %0" : "=m"(mode) : : "memory"); return mode; }
INLINE void set_mode(float_mode mode) { __asm__ volatile("ldmxcsr %0" : : "m"(mode) : "memory"); }
INLINE float_mode ieee(float_mode mode) { return mode & ~0x8040u; }
#elif defined(__aarch64__)
typedef uint64_t float_mode;
INLINE float_mode current_mode(void) { float_mode mode; __asm__ volatile("mrs %0, fpcr" : "=r"(mode) : : "memory"); return mode; }
INLINE void set_mode(float_mode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
INLINE float_mode ieee(float_mode mode) { return mode & ~((float_mode)1 << 24); }
#else
typedef int float_mode;
INLINE float_mode current_mode(void) { return 0; }
INLINE void set_mode(float_mode mode) { (void)mode; }
INLINE float_mode ieee(float_mode mode) { return mode; }
#endif

/* Called by each thread of a step with the same counter, which starts at zero. */
void megatrain_host_adamw(const struct tensor *tensors, int64_t count, int64_t *next) {
    const float_mode callers = current_mode();
    set_mode(ieee(callers));
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
    set_mode(callers);
}

/* So that a library of another version is refused, not misread. FORMAT changes with what is stored: codes, halves, noise. */
int64_t megatrain_host_adamw_abi(void) { return FORMAT << 32 | (int64_t)sizeof(struct tensor); }

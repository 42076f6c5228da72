// Functions of single numbers that every processor rounds alike, and the macros of each instruction set.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK 64    // rows from one multiple of which to the next a recurrent layer's state is kept
#define RING 128    // rows behind a state that are kept
#define WIDEST 1024 // numbers of a head
#define ROUNDING 0x1.8p52 // what makes a float64 an integer that is added, and taken away again
#define DEEPEST 47        // natural logarithms below the likeliest token: noise makes up for less
#define HALF_ROOT 0x1.6a09e667f3bcdp-1 // of a half: its square root
#define GOLDEN 0x9e3779b97f4a7c15u

// How numbers are stored: float32, bfloat16; keys and values also as codes, int8 or float8 (e4m3), with a float32 scale
// behind the codes of a head. Packed codes have fewer bits, and such heads are rotated; see row_format.py.
enum { FLOATS, BRAINS, INT8S, FLOAT8S, INT4S, INT35S };

// Some bits of the codes of the numbers from `start` to `stop`, which count halves of a head; as in row_format.py.
typedef struct {
    int start, stop, bits, shift;
} plane_t;

static const plane_t INT4_PLANES[] = {{0, 2, 4, 0}};
static const plane_t INT35_PLANES[] = {{0, 1, 4, 0}, {1, 2, 2, 2}, {1, 2, 1, 1}};
#define STEPS 16.0f // half the number of steps of a packed code

static inline int is_packed(int form) { return form >= INT4S; }

// The planes of a packed form, and how many they are.
static inline const plane_t *planes_of(int form, int *count) {
    *count = form == INT4S ? 1 : 3;
    return form == INT4S ? INT4_PLANES : INT35_PLANES;
}

static inline long plane_bytes(const plane_t *plane, long head) {
    return (plane->stop - plane->start) * head / 2 * plane->bits / 8;
}

// Bytes that a head of keys or values takes. Packed rows end at a multiple of four, with their scale.
static inline long row_bytes(long head, int form) {
    int count;
    long codes = 0;
    if (!is_packed(form)) return form == FLOATS ? 4 * head : form == BRAINS ? 2 * head : head + 4;
    const plane_t *const planes = planes_of(form, &count);
    for (int i = 0; i < count; i++) codes += plane_bytes(planes + i, head);
    return (codes + 3) / 4 * 4 + 4;
}

static inline float float_of(uint32_t bits) {
    float one;
    memcpy(&one, &bits, sizeof one);
    return one;
}

static inline uint32_t bits_of(float one) {
    uint32_t bits;
    memcpy(&bits, &one, sizeof bits);
    return bits;
}

// The last part of SplitMix64; see adapters/models/kernels/functions/noise.py.
static inline __attribute__((always_inline)) uint64_t mixed(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline __attribute__((always_inline)) float widened(uint16_t brain) { return float_of((uint32_t)brain << 16); }

static inline __attribute__((always_inline)) float half_float(uint16_t half) { // of finite ones
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    const float small = (float)rest * 5.9604644775390625e-8f; // 2^-24
    return float_of((rest < 0x400 ? bits_of(small) : (rest << 13) + (112u << 23)) | sign);
}

static inline __attribute__((always_inline)) uint16_t rounded(float one) { // to the nearest, or the even one of two
    const uint32_t bits = bits_of(one);
    const uint32_t found = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : found);
}

static inline __attribute__((always_inline)) double double_of(int64_t word) {
    double one;
    memcpy(&one, &word, sizeof one);
    return one;
}

static inline __attribute__((always_inline)) int64_t word_of(double one) {
    int64_t word;
    memcpy(&word, &one, sizeof word);
    return word;
}

// Returns a number that times 2^power is e^x, within two units in the last place, by operations that every processor
// rounds alike. x: between -104 and 104, or NaN.
static inline __attribute__((always_inline)) float powered(float x, uint32_t *power) {
    const float shifted = __builtin_fmaf(x, 1.44269504088896341f, 12582912.0f);
    const float whole = shifted - 12582912.0f;
    *power = bits_of(shifted) - bits_of(12582912.0f);
    float r = __builtin_fmaf(whole, -0.693359375f, x);
    r = __builtin_fmaf(whole, 2.12194440e-4f, r);
    float found = 1.9875691500e-4f;
    found = __builtin_fmaf(found, r, 1.3981999507e-3f);
    found = __builtin_fmaf(found, r, 8.3334519073e-3f);
    found = __builtin_fmaf(found, r, 4.1665795894e-2f);
    found = __builtin_fmaf(found, r, 1.6666665459e-1f);
    found = __builtin_fmaf(found, r, 5.0000001201e-1f);
    return __builtin_fmaf(found * r, r, r) + 1.0f;
}

static inline __attribute__((always_inline)) float exponential(float x) {
    x = x > 104.0f ? 104.0f : x; // what is no number stays none
    x = x < -104.0f ? -104.0f : x;
    uint32_t power;
    const float found = powered(x, &power);
    const uint32_t half = (power + 256) / 2 - 128; // in two steps, since 2^power may be no float
    return found * float_of((half + 127) << 23) * float_of((power - half + 127) << 23);
}

// e^x of a number that is not above zero; zero where e^x is hardly more.
static inline __attribute__((always_inline)) float weight_of(float x) {
    uint32_t power;
    const float kept = x < -87.0f ? -87.0f : x, found = powered(kept, &power) * float_of((power + 127) << 23);
    return x < -87.0f ? 0.0f : found;
}

static inline __attribute__((always_inline)) float number(const void *of, long at, int brain) {
    return brain ? widened(((const uint16_t *)of)[at]) : ((const float *)of)[at];
}

// What the codes of a head of so many numbers are multiplied with.
static inline __attribute__((always_inline)) float scale_of(const char *row, long size) {
    float scale;
    memcpy(&scale, row + size, sizeof scale);
    return scale;
}

// The number of a code that is the uppermost byte of a word, without its scale.
static inline __attribute__((always_inline)) float decoded(uint32_t word, int form) {
    if (form == INT8S) return (float)((int32_t)word >> 24);
    return float_of((word & 0x80000000) | (word & 0x7f000000) >> 4) * 0x1p120f; // exponents begin at -6, not at -126
}

// The code nearest to a number, ties to even. A number beyond all codes gets some code as well.
static inline __attribute__((always_inline)) uint8_t encoded(float one, int form) {
    if (form == INT8S) return (uint8_t)bits_of(one + 12582912.0f);
    const uint32_t bits = bits_of(one) & 0x7fffffff, sign = bits_of(one) >> 24 & 0x80;
    const uint32_t small = bits_of(float_of(bits) + 16384.0f) - bits_of(16384.0f); // below 2^-6 codes are evenly apart
    const uint32_t large = (bits + 0x7ffff + (bits >> 20 & 1)) / 0x100000 - 120 * 8;
    const uint32_t found = bits < 0x3c800000 ? small : large;
    return (uint8_t)(sign | (found > 0x7e ? 0x7e : found));
}

static inline __attribute__((always_inline)) void put(void *to, long at, float one, int brain) {
    if (brain) ((uint16_t *)to)[at] = rounded(one);
    else ((float *)to)[at] = one;
}

static inline __attribute__((always_inline)) float swish(float x) { return x / (1.0f + exponential(-x)); }

static inline __attribute__((always_inline)) float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// log(1 + e^x), within a few units in the last place.
static inline __attribute__((always_inline)) float softplus(float x) {
    const float e = weight_of(x > 0.0f ? -x : x), u = 1.0f + e, rest = e - (u - 1.0f);
    const float whole = u > 1.41421356f ? 1.0f : 0.0f, z = (u > 1.41421356f ? u * 0.5f : u) - 1.0f;
    float found = 7.0376836292e-2f;
    found = __builtin_fmaf(found, z, -1.1514610310e-1f);
    found = __builtin_fmaf(found, z, 1.1676998740e-1f);
    found = __builtin_fmaf(found, z, -1.2420140846e-1f);
    found = __builtin_fmaf(found, z, 1.4249322787e-1f);
    found = __builtin_fmaf(found, z, -1.6668057665e-1f);
    found = __builtin_fmaf(found, z, 2.0000714765e-1f);
    found = __builtin_fmaf(found, z, -2.4999993993e-1f);
    found = __builtin_fmaf(found, z, 3.3333331174e-1f);
    found = __builtin_fmaf(found * z, z * z, whole * -2.12194440e-4f) - 0.5f * z * z;
    found = whole * 0.693359375f + (z + found) + rest / u;
    return (x > 0.0f ? x : 0.0f) + found;
}

typedef struct { // of rows of `width` numbers
    void *residual;
    const void *delta, *weight;
    void *out;
    long width;
    int brain, weight_brain;
    float eps;
} norm_t;

#define NORMED_KEYS 1 // queries and keys are normed
#define NORMED_VALUES 2

typedef struct { // of what is projected of rows: `queries` heads, `kv` heads of keys, `kv` heads of values
    const void *projected;
    long stride, queries, kv, head;
    const float *bias, *weight, *cos, *sin; // bias: of all heads, or not there. weight: of queries and keys
    long turned;                            // half of the numbers of a head that are rotated
    const int64_t *slots, *positions;
    void *keys, *values; // where both are the same, rows have no values of their own
    long slot, group, apart; // bytes between slots, heads and rows, of keys and values alike
    float *out;
    int brain, key_form, value_form, normed; // forms: as rows are kept. normed: NORMED_KEYS, NORMED_VALUES, or both
    float eps;
} heads_t;

typedef struct { // how numbers of packed weights lie; see steps.h
    int kind, scale, inner, least; // of steps; how scales are stored; are there factors of groups; what is least
    int raised;                    // by how much steps are, for rows in fixed point
    long group, per, record;       // terms of a group, groups that share a scale, bytes of a panel's 32 outputs for those
    float table[16];               // what steps of four bits stand for
    uint8_t places[16];            // the same, raised
} packed_t;

// Steps: integers of 8 bits, places in a table, E4M3; floats; and for rows in fixed point, raised: integers of 8 bits, of
// 4 bits, places in a table.
enum { EIGHT, FOUR, EIGHT_FLOATING, EXPANDED, FIXED_EIGHT, FIXED_FOUR, FIXED_PLACES };
enum { FLOATS_32, BRAINS_16, HALVES_16 };       // scales
enum { NONE, OF_SCALE, OWN, ALONE };            // what is least: nothing; a multiple of the scale, or of a number; a number

typedef struct { // of a row's terms of one group in fixed point; see fixed.h
    float unit;    // what 1 stands for; no number, where some term is none or infinite
    float added;   // all of them added up
    int32_t start; // of sums of products with steps
} fixed_t;

typedef struct { // of a recurrent layer: what is convolved of rows, and what of earlier ones is kept for that
    const void *mixed;
    long stride, channels, key_heads, key_size;
    const float *taps;
    const int64_t *slots, *positions, *bases;
    const void *conv, *inputs;
    float *out;
    int brain;
} convolve_t;

// The input `back` rows before a row: of the same step, in the ring, or before the state.
static inline const void *input_of(const convolve_t *job, long row, long back) {
    const long slot = job->slots[row], at = job->positions[row] - back, base = job->bases[row], own = row - back;
    const long width = job->brain ? 2 : 4;
    if (own >= 0 && job->slots[own] == slot && job->positions[own] == at)
        return (const char *)job->mixed + own * job->stride * width;
    if (at >= base) return (const char *)job->inputs + (slot * RING + at % RING) * job->channels * width;
    return (const char *)job->conv + (slot * 3 + 3 + at - base) * job->channels * width;
}

typedef struct isa isa_t;

// R rows, if there are so many, with all of some panels, P panels at a time where SEVERAL go together, and UNITS times two
// vectors of each. TILE: a statement for R rows and P panels. How products of all kinds are cut.
#define OF_PANELS(R, P, UNITS, TILE)                                                                                   \
    for (; panels >= (P); panels -= (P), w += (P) * apart, sums += 32 * (P))                                           \
        for (int unit = 0; unit < 16 / LANES; unit += (UNITS)) { TILE(R, P) }
#define OF_ROWS(R, P, UNITS, SEVERAL, TILE)                                                                            \
    if (rows >= (R)) {                                                                                                 \
        if ((P) > 1 && (SEVERAL)) { OF_PANELS(R, P, UNITS, TILE) }                                                     \
        OF_PANELS(R, 1, UNITS, TILE)                                                                                   \
        return (R);                                                                                                    \
    }

typedef struct { // of a recurrent layer: rows that read its state, and what of earlier ones is kept for that
    const isa_t *isa;
    const float *rows; // queries, keys and values of each
    const void *projected;
    long stride, key_heads, heads, key_size, size;
    const float *rate, *dt_bias;
    const int64_t *slots, *positions, *bases, *counts;
    const long *firsts;
    float *memory, *keys, *deltas, *decays;
    float *gates, *out;
    int brain, settles;
} delta_t;

typedef struct { // rows of `heads` heads, and what they are gated with
    const void *x, *gate;
    long stride, heads, size;
    const float *weight;
    void *out;
    int brain;
    float eps;
} gated_t;

typedef void multiply_t(long, int, int, const float *, long, const char *, long, long, float *, long, int);

struct isa { // one instruction set's
    multiply_t *multiply;
    void (*widen)(const uint16_t *, float *, long);
    void (*gate)(float *, const float *, long);
    void (*round)(const float *, uint16_t *, long);
    void (*norm)(const norm_t *, long);
    void (*prepare)(const heads_t *, long);
    void (*hadamard)(float *, long);
    void (*unpack)(const uint8_t *, long, int, int8_t *);
    void (*turn)(const void *, long, long, float *, int);
    void (*align)(const void *, long, long, float *, int);
    void (*weigh)(float *, long, long, long, float *);
    void (*join)(float *, const float *, long, int);
    void (*finish)(const float *, long, void *, long, int);
    void (*convolve)(const convolve_t *, long);
    void (*gates)(const delta_t *, long);
    void (*recur)(const delta_t *, long);
    void (*gated)(const gated_t *, long);
    int lanes; // columns of a state that go together
    void (*multiply_packed)(
        long, int, const packed_t *, const float *, long, const char *, long, long, float *, long, int, const float *, long
    );
    void (*expand)(const packed_t *, const char *, long, float *);
    void (*fix)(const packed_t *, const uint16_t *, long, int16_t *, fixed_t *);
    void (*multiply_fixed)(
        long, int, const packed_t *, const int16_t *, long, const char *, long, long, float *, long, int, const fixed_t *, long
    );
    int (*extremes)(const float *, long, float *, float *);
    void (*allow)(const float *, const uint8_t *, long, float *);
    void (*weights)(const float *, long, double, double, const double *, int64_t *);
    uint64_t (*likely)(const float *, long, double, double, uint64_t, const int64_t *);
};

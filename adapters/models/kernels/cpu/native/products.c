// Matrix products whose bits depend on the operands alone, not on how they are computed: see tiles.h, docs/DETERMINISM.md.
// Compiled at installation (hatch_build.py), loaded by native_library.py. The Python modules check all arguments; nothing here does.
#define _GNU_SOURCE
#include "numbers.h"
#include "pool.h"

#define ROWS 256  // at once, so that a panel's sums stay near
#define TERMS 384 // of a chain before it is set down, in wide products: a panel's weights stay near as well
#define NARROW 12 // rows: so few take a chain in one go
#define AHEAD 1024 // bytes of a packed panel that are fetched before they are multiplied
#define FETCHED 8192 // bytes of a panel in bfloat16 that wide tiles fetch before they are multiplied, and the next panel's
#define FETCHING 4   // rows of such a tile: narrower ones read no faster than the processor fetches by itself
#define KEYS 128   // of a tile of attention
#define PANELS 4   // that go together at most: of 32 outputs each

typedef struct {
    float of[16];
} plain_t;

static inline plain_t plain_load(const float *from) {
    plain_t found;
    memcpy(&found, from, sizeof found);
    return found;
}

static inline plain_t plain_spread(float one) {
    plain_t found;
    for (int i = 0; i < 16; i++) found.of[i] = one;
    return found;
}

static inline plain_t plain_fma(plain_t a, plain_t b, plain_t c) {
    for (int i = 0; i < 16; i++) c.of[i] = fmaf(a.of[i], b.of[i], c.of[i]);
    return c;
}

static inline plain_t plain_half(const char *from, int second) {
    plain_t found;
    for (int i = 0; i < 16; i++) found.of[i] = widened(((const uint16_t *)from)[2 * i + second]);
    return found;
}

static inline plain_t plain_words(const float *from, int apart) {
    plain_t found;
    for (int i = 0; i < 16; i++) found.of[i] = from[(long)i * apart];
    return found;
}

static inline plain_t plain_halves(plain_t words, int high) {
    for (int i = 0; i < 16; i++) {
        const uint32_t bits = bits_of(words.of[i]);
        words.of[i] = float_of(high ? bits & 0xffff0000 : bits << 16);
    }
    return words;
}

static inline plain_t plain_times(plain_t a, plain_t b) {
    for (int i = 0; i < 16; i++) a.of[i] *= b.of[i];
    return a;
}

static inline plain_t plain_bytes(const char *from) {
    plain_t found;
    for (int i = 0; i < 16; i++) found.of[i] = ((const int8_t *)from)[i];
    return found;
}

static inline plain_t plain_eighths(const char *from) {
    plain_t found;
    for (int i = 0; i < 16; i++) found.of[i] = half_float((uint16_t)((((const int8_t *)from)[i] * 128) & 0xbfff));
    return found;
}

static inline plain_t plain_halves_at(const char *from, int brain) {
    plain_t found;
    for (int i = 0; i < 16; i++) {
        const uint16_t one = ((const uint16_t *)from)[i];
        found.of[i] = brain ? widened(one) : half_float(one);
    }
    return found;
}

typedef struct {
    uint32_t of[16];
} words_t;

static inline words_t plain_words_at(const char *from) {
    words_t found;
    memcpy(&found, from, sizeof found);
    return found;
}

static inline plain_t plain_nibble(words_t words, const float *table) {
    plain_t found;
    for (int i = 0; i < 16; i++) found.of[i] = table[words.of[i] & 15];
    return found;
}

static inline words_t plain_next(words_t words) {
    for (int i = 0; i < 16; i++) words.of[i] >>= 4;
    return words;
}

static inline words_t plain_dot(words_t sum, words_t a, words_t b) {
    for (int i = 0; i < 16; i++)
        sum.of[i] += (uint32_t)((int16_t)a.of[i] * (int16_t)b.of[i] + (int16_t)(a.of[i] >> 16) * (int16_t)(b.of[i] >> 16));
    return sum;
}

static inline words_t plain_spread_word(int32_t one) {
    words_t found;
    for (int i = 0; i < 16; i++) found.of[i] = (uint32_t)one;
    return found;
}

static inline words_t plain_pair_at(const int16_t *from) {
    int32_t pair;
    memcpy(&pair, from, sizeof pair);
    return plain_spread_word(pair);
}

static inline words_t plain_parts(words_t words, int shift, uint32_t mask) {
    for (int i = 0; i < 16; i++) words.of[i] = words.of[i] >> shift & mask;
    return words;
}

static inline words_t plain_placed(words_t words, int high, const uint8_t *places) {
    for (int i = 0; i < 16; i++) {
        uint32_t found = 0;
        for (int byte = 0; byte < 4; byte++) found |= (uint32_t)places[words.of[i] >> (8 * byte + 4 * high) & 15] << 8 * byte;
        words.of[i] = found;
    }
    return words;
}

static inline plain_t plain_whole(words_t words) {
    plain_t found;
    for (int i = 0; i < 16; i++) found.of[i] = (float)(int32_t)words.of[i];
    return found;
}

#define ON(name) name##_plain
#define FOR
#define V plain_t
#define LANES 16
#define ZERO() plain_spread(0.0f)
#define LOAD plain_load
#define STORE(to, from) memcpy(to, &(from), sizeof(plain_t))
#define SPREAD plain_spread
#define FMA plain_fma
#define HALF plain_half
#define WORDS(at, apart) plain_words(at, apart)
#define WORDS_LOW(words) plain_halves(words, 0)
#define WORDS_HIGH(words) plain_halves(words, 1)
#define TILES ON_TILE(1, 1)
#define W words_t
#define MUL plain_times
#define BYTES plain_bytes
#define EIGHTHS plain_eighths
#define HALF_FLOATS(at) plain_halves_at(at, 0)
#define BRAIN_FLOATS(at) plain_halves_at(at, 1)
#define WORDS_AT plain_words_at
#define TABLE_OF(table, from) float *const table = from
#define NIBBLE plain_nibble
#define NEXT plain_next
#define PACKED_TILES ON_TILE(1, 1)
#define FOR_FIXED
#define DOT plain_dot
#define PAIR_AT plain_pair_at
#define EVENS(words) plain_parts(words, 0, 0x00ff00ff)
#define ODDS(words) plain_parts(words, 8, 0x00ff00ff)
#define NIBBLES(words, j) plain_parts(words, 4 * (j), 0x000f000f)
#define PLACES(places, from) uint8_t *const places = from
#define PLACED plain_placed
#define SPREAD_WORD plain_spread_word
#define WHOLE plain_whole
#define FIXED_TILES ON_TILE(1, 1)
#include "tiles.h"
#include "steps.h"
#include "fixed.h"
#include "rows.h"
#include "recurrent.h"
#include "odds.h"
#include "keys.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define ON(name) name##_avx2
#define FOR __attribute__((target("avx2,fma,f16c")))
#define V __m256
#define LANES 8
#define ZERO _mm256_setzero_ps
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define SPREAD _mm256_set1_ps
#define FMA _mm256_fmadd_ps
#define HALF(at, second)                                                                                               \
    _mm256_castsi256_ps(                                                                                               \
        second ? _mm256_and_si256(WORDS_AT(at), _mm256_set1_epi32((int)0xffff0000)) : _mm256_slli_epi32(WORDS_AT(at), 16) \
    )
#define WORDS(at, apart) _mm256_i32gather_ps(at, _mm256_mullo_epi32(_mm256_set1_epi32(apart), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)), 4)
#define WORDS_LOW(words) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(words), 16))
#define WORDS_HIGH(words)                                                                                              \
    _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(words), _mm256_set1_epi32((int)0xffff0000)))
#define TILES ON_TILE(5, 1) ON_TILE(4, 1) ON_TILE(3, 1) ON_WHOLE(2, 1) ON_WHOLE(1, 2)
#define W __m256i
#define MUL _mm256_mul_ps
#define BYTES(at) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at))))
#define EIGHTHS(at)                                                                                                    \
    _mm256_cvtph_ps(_mm_and_si128(                                                                                     \
        _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(at))), 7), _mm_set1_epi16((short)0xbfff)    \
    ))
#define HALF_FLOATS(at) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at)))
#define BRAIN_FLOATS(at)                                                                                               \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(at))), 16))
#define WORDS_AT(at) _mm256_loadu_si256((const __m256i *)(at))
#define TABLE_OF(table, from) __m256 table[2] = {_mm256_loadu_ps(from), _mm256_loadu_ps((from) + 8)}
#define NIBBLE(words, table)                                                                                           \
    _mm256_blendv_ps(                                                                                                  \
        _mm256_permutevar8x32_ps(table[0], words), _mm256_permutevar8x32_ps(table[1], words),                          \
        _mm256_castsi256_ps(_mm256_slli_epi32(words, 28))                                                              \
    )
#define NEXT(words) _mm256_srli_epi32(words, 4)
#define PACKED_TILES ON_TILE(4, 1) ON_TILE(1, 2)
#define FOR_FIXED FOR
#define DOT(sum, a, b) _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))
#define PAIR_AT(from) _mm256_set1_epi32(*(const int32_t *)(from))
#define EVENS(words) _mm256_and_si256(words, _mm256_set1_epi32(0x00ff00ff))
#define ODDS(words) _mm256_srli_epi16(words, 8)
#define NIBBLES(words, j) _mm256_and_si256(_mm256_srli_epi16(words, 4 * (j)), _mm256_set1_epi32(0x000f000f))
#define PLACES(places, from) __m256i places = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(from)))
#define PLACED(words, high, places) _mm256_shuffle_epi8(places, _mm256_and_si256(_mm256_srli_epi16(words, 4 * (high)), _mm256_set1_epi8(15)))
#define SPREAD_WORD _mm256_set1_epi32
#define WHOLE _mm256_cvtepi32_ps
#define ALL_OF(words, mask) _mm256_and_si256(words, _mm256_set1_epi32(mask))
#define TOPS(words) _mm256_srli_epi16(words, 12)
#define ADDED _mm256_add_epi32
#define DOWN _mm256_srai_epi32
#define FIXED_TILES ON_TILE(4, 1) ON_TILE(1, 2)
#include "tiles.h"
#include "steps.h"
#include "fixed.h"
#include "rows.h"
#include "recurrent.h"
#include "odds.h"
#include "keys.h"

#define ON(name) name##_avx512
#define FOR __attribute__((target("avx512f,avx2,fma,f16c,prefer-vector-width=512")))
#define V __m512
#define LANES 16
#define ZERO _mm512_setzero_ps
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define SPREAD _mm512_set1_ps
#define FMA _mm512_fmadd_ps
#define HALF(at, second)                                                                                               \
    _mm512_castsi512_ps(                                                                                               \
        second ? _mm512_and_si512(WORDS_AT(at), _mm512_set1_epi32((int)0xffff0000)) : _mm512_slli_epi32(WORDS_AT(at), 16) \
    )
#define WORDS(at, apart)                                                                                               \
    _mm512_i32gather_ps(                                                                                               \
        _mm512_mullo_epi32(                                                                                            \
            _mm512_set1_epi32(apart), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)          \
        ),                                                                                                             \
        at, 4                                                                                                          \
    )
#define WORDS_LOW(words) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(words), 16))
#define WORDS_HIGH(words)                                                                                              \
    _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(words), _mm512_set1_epi32((int)0xffff0000)))
#define TILES ON_TILE(12, 1) ON_TILE(8, 1) ON_TILE(4, 2) ON_TILE(2, 4) ON_TILE(1, 4)
#define W __m512i
#define MUL _mm512_mul_ps
#define BYTES(at) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at))))
#define EIGHTHS(at)                                                                                                    \
    _mm512_cvtph_ps(_mm256_and_si256(                                                                                  \
        _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(at))), 7),                            \
        _mm256_set1_epi16((short)0xbfff)                                                                               \
    ))
#define HALF_FLOATS(at) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(at)))
#define BRAIN_FLOATS(at)                                                                                               \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(at))), 16))
#define WORDS_AT(at) _mm512_loadu_si512(at)
#define TABLE_OF(table, from) __m512 table = _mm512_loadu_ps(from)
#define NIBBLE(words, table) _mm512_permutexvar_ps(words, table)
#define NEXT(words) _mm512_srli_epi32(words, 4)
#define PACKED_TILES ON_TILE(12, 1) ON_TILE(4, 2) ON_TILE(1, 4)
#define FOR_FIXED __attribute__((target("avx512f,avx512bw,avx512vnni,avx2,fma,f16c,prefer-vector-width=512")))
#define DOT _mm512_dpwssd_epi32
#define PAIR_AT(from) _mm512_set1_epi32(*(const int32_t *)(from))
#define EVENS(words) _mm512_and_si512(words, _mm512_set1_epi32(0x00ff00ff))
#define ODDS(words) _mm512_srli_epi16(words, 8)
#define NIBBLES(words, j) _mm512_and_si512(_mm512_srli_epi16(words, 4 * (j)), _mm512_set1_epi32(0x000f000f))
#define PLACES(places, from) __m512i places = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(from)))
#define PLACED(words, high, places) _mm512_shuffle_epi8(places, _mm512_and_si512(_mm512_srli_epi16(words, 4 * (high)), _mm512_set1_epi8(15)))
#define SPREAD_WORD _mm512_set1_epi32
#define WHOLE _mm512_cvtepi32_ps
#define ALL_OF(words, mask) _mm512_and_si512(words, _mm512_set1_epi32(mask))
#define TOPS(words) _mm512_srli_epi16(words, 12)
#define ADDED _mm512_add_epi32
#define DOWN _mm512_srai_epi32
#define FIXED_TILES ON_TILE(12, 1) ON_TILE(4, 2) ON_TILE(1, 4)
#include "tiles.h"
#include "steps.h"
#include "fixed.h"
#include "rows.h"
#include "recurrent.h"
#include "odds.h"
#include "keys.h"
#if defined(__clang__) || __GNUC__ >= 10
#define PAIRED // this compiler knows the instruction for pairs of bfloat16
#endif
#if defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define TILED // and those of AMX
#endif
#endif

#ifdef PAIRED // tiles.h with pairs, rows' and weights', where it has floats
#define ON(name) name##_pairs
#define FOR __attribute__((target("avx512f,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")))
#define V __m512
#define LANES 16
#define ZERO _mm512_setzero_ps
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define SPREAD _mm512_set1_ps
#define FMA(a, b, c) _mm512_dpbf16_ps(c, (__m512bh)(b), (__m512bh)(a))
#define TILES ON_TILE(12, 1) ON_TILE(8, 1) ON_TILE(4, 2) ON_TILE(2, 4) ON_TILE(1, 4)
#include "tiles.h"
#endif

static const isa_t *isa_of(int level) {
#if defined(__x86_64__)
    if (level >= 2) return &isa_avx512;
    if (level == 1) return &isa_avx2;
#endif
    return &isa_plain;
}

// Whose products of rows in fixed point: all give the same bits, and not every AVX-512 has these instructions.
static const isa_t *fixed_isa_of(int level) {
#if defined(__x86_64__)
    if (level >= 2 && !(__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni"))) return &isa_avx2;
#endif
    return isa_of(level);
}

// Makes products with bfloat16 weights treat subnormal numbers as zeros, and flush subnormal results to zero, as the
// instruction for pairs does. Returns the previous setting.
static unsigned without_subnormals(void) {
#if defined(__x86_64__)
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
#else
    return 0;
#endif
}

static void as_before(unsigned before) {
#if defined(__x86_64__)
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

#if defined(__x86_64__)
#include "amx.h"
#endif

#ifdef PAIRED
#define TRIED 64 // terms

// Whether this processor's instruction for pairs adds in the order of tiles.h, which not every maker documents.
static int pairs_agree(void) {
    uint16_t x[12 * TRIED], w[32 * TRIED];
    float wide[12 * TRIED], chains[12 * 32], found[12 * 32];
    uint32_t state = 1;
    for (int round = 0; round < 64; round++) {
        for (int i = 0; i < 44 * TRIED; i++) { // of many magnitudes; in some rounds sums come near to what is no normal number
            state = state * 1664525 + 1013904223;
            const uint16_t one = (state >> 16 & 0x807f) | ((round % 4 ? 110 : 50) + (state >> 8 & 31)) << 7;
            if (i < 12 * TRIED) wide[i] = widened(x[i] = one);
            else w[i - 12 * TRIED] = one;
        }
        const unsigned before = without_subnormals();
        multiply_avx512(12, 1, BRAINS, wide, TRIED, (const char *)w, 0, TRIED, chains, 32, 0);
        as_before(before);
        multiply_pairs(12, 1, FLOATS, (const float *)x, TRIED / 2, (const char *)w, 0, TRIED / 2, found, 32, 0);
        if (memcmp(found, chains, sizeof found)) return 0;
    }
    return 1;
}
#endif

// The highest level that this processor has: 4 AMX, 3 AVX-512 with pairs of bfloat16, 2 AVX-512, 1 AVX2 with FMA, 0
// whatever the compiler made of it. Products of bfloat16 have other bits at level 4 than at all others, see amx.h.
int rekindle_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
    if (!__builtin_cpu_supports("avx512f")) return 1;
    if (find_tiles()) return 4;
#ifdef PAIRED
    if (__builtin_cpu_supports("avx512bf16") && pairs_agree()) return 3;
#endif
    return 2;
#endif
    return 0;
}

// What multiplies rows with weights of a form. words: becomes FLOATS where both are pairs of bfloat16 that are moved as floats.
static multiply_t *multiply_of(int level, int form, int x_brain, int *words) {
    *words = form;
    if (form != BRAINS || !x_brain) return isa_of(level)->multiply;
#if defined(__x86_64__)
    if (level >= 4) {
        *words = FLOATS;
        return multiply_amx;
    }
#endif
#ifdef PAIRED
    if (level == 3) {
        *words = FLOATS;
        return multiply_pairs;
    }
#endif
    return isa_of(level)->multiply;
}

const char *rekindle_sources(void) { return SOURCES; }

typedef struct {
    const void *weight;
    void *packed;
    long outputs, terms;
    int form;
} packing_t;

// Both forms are words of 32 bits, moved as they are: a float each, or a pair of bfloat16.
static void pack_panel(void *of, long panel) {
    const packing_t *const job = of;
    const long bytes = job->terms * (job->form == BRAINS ? 2 : 4), words = (bytes + 3) / 4;
    uint32_t *const to = (uint32_t *)job->packed + panel * words * 32;
    for (long start = 0; start < words; start += 32) // two cache lines of each output, then of the next
        for (long at = 0; at < 32; at++) {
            const long output = panel * 32 + at, stop = words < start + 32 ? words : start + 32;
            const char *const from = (const char *)job->weight + output * bytes;
            const long there = output < job->outputs ? bytes / 4 : 0, whole = there < stop ? there : stop;
            long k = start;
            for (; k < whole; k++) memcpy(&to[k * 32 + at], from + k * 4, 4);
            for (; k < stop; k++) {
                uint32_t last = 0;
                if (output < job->outputs) memcpy(&last, from + k * 4, (size_t)(bytes - k * 4));
                to[k * 32 + at] = last;
            }
        }
}

// weight: [outputs, terms] -> panels of 32 outputs, [panels, terms, 32], in bfloat16 [panels, pairs of terms, 32, 2]; zeros
// for outputs that are not there, and for what an odd last term has none beside it.
void rekindle_pack(const void *weight, void *packed, long outputs, long terms, int form, int threads) {
    packing_t job = {weight, packed, outputs, terms, form};
    share(threads, (outputs + 31) / 32, pack_panel, &job);
}

typedef struct {
    const isa_t *isa;
    multiply_t *multiply;
    const float *x;
    long rows, stride;
    const char *weights[2]; // the second one gates with the first, or is not there
    int form, together;     // pairs of bfloat16 are words as floats are
    long outputs, terms;
    char *out;
    long apart; // numbers between rows of what comes out
    int brain;
} product_t;

// Rows of sums, `width` floats apart, to where they go: gated, if there is something to gate them with, and rounded.
static void leave(
    const isa_t *isa, float *sums, const float *gates, long rows, long width, long count, char *out, long apart, int brain
) {
    for (long row = 0; row < rows; row++, sums += width, out += apart * (brain ? 2 : 4)) {
        if (gates) isa->gate(sums, gates + row * width, count);
        if (brain) isa->round(sums, (uint16_t *)out, count);
        else memcpy(out, sums, (size_t)count * sizeof(float));
    }
}

static void multiply_group(void *of, long group) {
    static _Thread_local float sums[2][ROWS * PANELS * 32];
    const product_t *const job = of;
    const long each = job->form == BRAINS ? 64 : 128; // bytes of a panel for a term
    const long apart = job->terms * each, first = group * job->together;
    const long all = (job->outputs + 31) / 32, left = all - first, width = job->together * 32;
    const int panels = (int)(left < job->together ? left : job->together);
    const long parts = job->rows <= NARROW ? 1 : (job->terms + TERMS - 1) / TERMS;
    const long step = ((job->terms + parts - 1) / parts + 15) / 16 * 16; // whole blocks of amx.h
    const unsigned before = job->form == BRAINS ? without_subnormals() : 0;
    for (int i = 0; i < 2 && job->weights[i]; i++)
        for (long k = 0; k < job->terms; k += step) {
            const char *const w = job->weights[i] + first * apart + k * each;
            const long terms = job->terms - k < step ? job->terms - k : step;
            job->multiply(
                job->rows, panels, job->form, job->x + k, job->stride, w, apart, terms, sums[i], width, k > 0
            );
        }
    if (job->form == BRAINS) as_before(before);
    const long start = first * 32, count = job->outputs - start < width ? job->outputs - start : width;
    char *const out = job->out + start * (job->brain ? 2 : 4);
    leave(job->isa, sums[0], job->weights[1] ? sums[1] : NULL, job->rows, width, count, out, job->apart, job->brain);
}

// out[rows, outputs] = x[rows, terms] @ weight.T, or silu(x @ gate.T) * (x @ up.T); x and out are bfloat16 (brain) or
// float32, their rows `stride` and `between` numbers apart. Returns 0, or -1 where there is no memory.
int rekindle_product(
    const void *x, int x_brain, long rows, long stride, const void *weight, const void *up, int form, long outputs,
    long terms, void *out, long between, int out_brain, int threads, int level
) {
    static _Thread_local float *wide;
    static _Thread_local long there;
    const isa_t *const isa = isa_of(level);
    int words;
    multiply_t *const multiply = multiply_of(level, form, x_brain, &words);
    long count = form == BRAINS ? (terms + 1) / 2 * 2 : terms;
    if (words != form) count /= 2;
    const long apart = (count + 15) / 16 * 16 + 16; // rows never a multiple of a page apart: they would share cache sets
    const long once = rows < ROWS ? rows : ROWS, panels = (outputs + 31) / 32;
    if (there < once * apart) {
        free(wide);
        wide = aligned_alloc(64, (size_t)(once * apart) * sizeof(float));
        there = wide ? once * apart : 0;
        if (!wide) return -1;
    }
    int together = PANELS;
    while (together > 1 && threads > 1 && panels < 4L * threads * together) together /= 2;
    for (long row = 0; row < rows; row += ROWS) {
        const long some = rows - row < ROWS ? rows - row : ROWS;
        for (long i = 0; i < some; i++) {
            const long from = (row + i) * stride;
            float *const to = wide + i * apart;
            to[count - 1] = 0.0f; // beside an odd last term, or with it
            if (words != form) memcpy(to, (const uint16_t *)x + from, (size_t)terms * 2);
            else if (x_brain) isa->widen((const uint16_t *)x + from, to, terms);
            else memcpy(to, (const float *)x + from, (size_t)terms * sizeof(float));
        }
        product_t job = {isa, multiply, wide, some, apart, {weight, up}, words, together, outputs, count, NULL, between,
                         out_brain};
        job.out = (char *)out + row * between * (out_brain ? 2 : 4);
        share(threads, (panels + together - 1) / together, multiply_group, &job);
    }
    return 0;
}

#define TOGETHER 16 // rows that a thread takes at once
#define HEADS_TOGETHER 4 // and of the preparation of heads, which takes longer than to share a loop

typedef struct {
    const isa_t *isa;
    const void *of;
    long rows, together;
    enum { NORM, HEADS, CONVOLVE, GATES, GATED } what;
} rows_t;

static void some_rows(void *of, long part) {
    const rows_t *const job = of;
    for (long row = part * job->together; row < job->rows && row < (part + 1) * job->together; row++) switch (job->what) {
        case NORM: job->isa->norm(job->of, row); break;
        case HEADS: job->isa->prepare(job->of, row); break;
        case CONVOLVE: job->isa->convolve(job->of, row); break;
        case GATES: job->isa->gates(job->of, row); break;
        case GATED: job->isa->gated(job->of, row); break;
        }
}

static void share_rows(rows_t *job, int threads) {
    share(threads, (job->rows + job->together - 1) / job->together, some_rows, job);
}

// residual[rows, width] += delta (if there is one), then out = the RMSNorm of it times weight[width].
void rekindle_norm(
    void *residual, const void *delta, const void *weight, void *out, long rows, long width, int brain,
    int weight_brain, float eps, int threads, int level
) {
    const norm_t norm = {residual, delta, weight, out, width, brain, weight_brain, eps};
    rows_t job = {isa_of(level), &norm, rows, TOGETHER, NORM};
    share_rows(&job, threads);
}

// Bias, norm, weight and rotation of projected heads: queries go to out[rows, queries, head], keys and values to their
// slots and positions, in the form that the caches have. Rows at position -1 are padded: nothing is kept of them. head:
// 1024 at most.
void rekindle_heads(
    const void *projected, long stride, long rows, long queries, long kv, long head, const float *bias,
    const float *weight, const float *cos, const float *sin, long turned, const int64_t *slots,
    const int64_t *positions, void *keys, void *values, long slot, long group, long apart, float *out, int brain,
    int key_form, int value_form, int normed, float eps, int threads, int level
) {
    const heads_t heads = {projected, stride, queries, kv,   head,  bias,  weight, cos,   sin,      turned,     slots,
                           positions, keys,   values,  slot, group, apart, out,    brain, key_form, value_form, normed,
                           eps};
    rows_t job = {isa_of(level), &heads, rows, HEADS_TOGETHER, HEADS};
    share_rows(&job, threads);
}

#include "attention.h"
#include "delta.h"
#include "packed.h"
#include "experts.h"
#include "layers.h"
#include "draw.h"
#include "rounds.h"
#include "texts.h"
#include "sums.h"
#include "frames.h"

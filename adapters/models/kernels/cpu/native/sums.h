// Sums of blocks of stored rows: XXH3 with 128 bits, its seed 0 and its own secret
// (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). All forms below give the same sums. Words are taken as
// little-endian, which the processors are.
//
// XXH3 reads 64 bytes with one product in each of eight lanes, and no lane waits for another one. XXH64, which zstd has for
// its frames, waits for two products of 64 bits one after the other. s/GB in the second cache of a Xeon with AMX: XXH64 0.094
// to 0.136, XXH64 of four frames side by side in AVX-512 0.047, XXH3 in AVX2 0.026 and in AVX-512 0.019.

#define SUM_BYTES 16
#define LEAST_SUMMED 256 // bytes: shorter contents, for which XXH3 has other rules, are taken with zeros behind them
#define STRIPE 64l
#define STRETCH 1024l // bytes between two scrambles: 16 stripes
#define SECRET_BYTES 192
#define SCRAMBLED_WITH 128 // where in the secret; and so on
#define LAST_WITH 121
#define MERGED_WITH 11
#define MERGED_LAST_WITH 117

// Bytes. From main memory AVX-512 takes 0.071 s/GB with it, and 0.096 without (Xeon with AMX).
#define FETCHED_AHEAD 4096

#define X32_1 0x9e3779b1u
#define X32_2 0x85ebca77u
#define X32_3 0xc2b2ae3du
#define XX1 0x9e3779b185ebca87u
#define XX2 0xc2b2ae3d27d4eb4fu
#define XX3 0x165667b19e3779f9u
#define XX4 0x85ebca77c2b2ae63u
#define XX5 0x27d4eb2f165667c5u

static const uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t take_word(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

// Adds a content of at least LEAST_SUMMED bytes to eight lanes.
typedef void (*add_content_t)(uint64_t *lanes, const uint8_t *at, long bytes);

// --- for any processor ---

static inline void add_stripe(uint64_t *lanes, const uint8_t *at, const uint8_t *secret) {
    for (int lane = 0; lane < 8; lane++) {
        const uint64_t word = take_word(at + 8 * lane), keyed = word ^ take_word(secret + 8 * lane);
        lanes[lane ^ 1] += word;
        lanes[lane] += (keyed & 0xffffffffu) * (keyed >> 32);
    }
}

static void add_content(uint64_t *lanes, const uint8_t *at, long bytes) {
    const uint8_t *const end = at + bytes;
    for (; end - at > STRETCH; at += STRETCH) {
        for (long stripe = 0; stripe < STRETCH / STRIPE; stripe++) {
            __builtin_prefetch(at + STRIPE * stripe + FETCHED_AHEAD);
            add_stripe(lanes, at + STRIPE * stripe, SECRET + 8 * stripe);
        }
        for (int lane = 0; lane < 8; lane++)
            lanes[lane] = (lanes[lane] ^ lanes[lane] >> 47 ^ take_word(SECRET + SCRAMBLED_WITH + 8 * lane)) * X32_1;
    }
    for (const uint8_t *secret = SECRET; end - at > STRIPE; at += STRIPE, secret += 8) add_stripe(lanes, at, secret);
    add_stripe(lanes, end - STRIPE, SECRET + LAST_WITH);
}

// --- in vectors ---

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define FOR_AVX2 __attribute__((target("avx2")))
#define FOR_AVX512 __attribute__((target("avx512f,prefer-vector-width=512")))
#define SWAPPED 0x4e // both words of each pair

FOR_AVX2 static inline __m256i load_four(const void *at) { return _mm256_loadu_si256((const __m256i *)at); }

FOR_AVX2 static inline __m256i add_four(__m256i lanes, const uint8_t *at, const uint8_t *secret) {
    const __m256i words = load_four(at), keyed = _mm256_xor_si256(words, load_four(secret));
    const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    return _mm256_add_epi64(product, _mm256_add_epi64(lanes, _mm256_shuffle_epi32(words, SWAPPED)));
}

FOR_AVX2 static inline __m256i scramble_four(__m256i lanes, const uint8_t *secret) {
    const __m256i by = _mm256_set1_epi64x(X32_1), mixed = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
    const __m256i keyed = _mm256_xor_si256(mixed, load_four(secret));
    const __m256i upper = _mm256_mul_epu32(_mm256_srli_epi64(keyed, 32), by);
    return _mm256_add_epi64(_mm256_mul_epu32(keyed, by), _mm256_slli_epi64(upper, 32));
}

FOR_AVX2 static void add_content_avx2(uint64_t *lanes, const uint8_t *at, long bytes) {
    const uint8_t *const end = at + bytes;
    __m256i some = load_four(lanes), others = load_four(lanes + 4);
    for (; end - at > STRETCH; at += STRETCH) {
        for (long stripe = 0; stripe < STRETCH / STRIPE; stripe++) {
            __builtin_prefetch(at + STRIPE * stripe + FETCHED_AHEAD);
            some = add_four(some, at + STRIPE * stripe, SECRET + 8 * stripe);
            others = add_four(others, at + STRIPE * stripe + 32, SECRET + 8 * stripe + 32);
        }
        some = scramble_four(some, SECRET + SCRAMBLED_WITH);
        others = scramble_four(others, SECRET + SCRAMBLED_WITH + 32);
    }
    for (const uint8_t *secret = SECRET; end - at > STRIPE; at += STRIPE, secret += 8) {
        some = add_four(some, at, secret);
        others = add_four(others, at + 32, secret + 32);
    }
    some = add_four(some, end - STRIPE, SECRET + LAST_WITH);
    others = add_four(others, end - STRIPE + 32, SECRET + LAST_WITH + 32);
    _mm256_storeu_si256((__m256i *)lanes, some);
    _mm256_storeu_si256((__m256i *)(lanes + 4), others);
}

FOR_AVX512 static inline __m512i add_eight(__m512i lanes, const uint8_t *at, const uint8_t *secret) {
    const __m512i words = _mm512_loadu_si512(at), keyed = _mm512_xor_si512(words, _mm512_loadu_si512(secret));
    const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    return _mm512_add_epi64(product, _mm512_add_epi64(lanes, _mm512_shuffle_epi32(words, (_MM_PERM_ENUM)SWAPPED)));
}

FOR_AVX512 static inline __m512i scramble_eight(__m512i lanes, const uint8_t *secret) {
    const __m512i by = _mm512_set1_epi64(X32_1), mixed = _mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 47));
    const __m512i keyed = _mm512_xor_si512(mixed, _mm512_loadu_si512(secret));
    const __m512i upper = _mm512_mul_epu32(_mm512_srli_epi64(keyed, 32), by);
    return _mm512_add_epi64(_mm512_mul_epu32(keyed, by), _mm512_slli_epi64(upper, 32));
}

FOR_AVX512 static void add_content_avx512(uint64_t *lanes, const uint8_t *at, long bytes) {
    const uint8_t *const end = at + bytes;
    __m512i all = _mm512_loadu_si512(lanes);
    for (; end - at > STRETCH; at += STRETCH) {
        for (long stripe = 0; stripe < STRETCH / STRIPE; stripe++) {
            __builtin_prefetch(at + STRIPE * stripe + FETCHED_AHEAD);
            all = add_eight(all, at + STRIPE * stripe, SECRET + 8 * stripe);
        }
        all = scramble_eight(all, SECRET + SCRAMBLED_WITH);
    }
    for (const uint8_t *secret = SECRET; end - at > STRIPE; at += STRIPE, secret += 8) all = add_eight(all, at, secret);
    all = add_eight(all, end - STRIPE, SECRET + LAST_WITH);
    _mm512_storeu_si512(lanes, all);
}

#define FORMS 3
static const add_content_t ADD_CONTENT[FORMS] = {add_content, add_content_avx2, add_content_avx512};
static int find_form(void) { return __builtin_cpu_supports("avx512f") ? 2 : __builtin_cpu_supports("avx2") ? 1 : 0; }
#else
#define FORMS 1
static const add_content_t ADD_CONTENT[FORMS] = {add_content};
static int find_form(void) { return 0; }
#endif

// --- sums ---

static inline uint64_t multiply_and_fold(uint64_t one, uint64_t other) {
    const unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merge_lanes(const uint64_t *lanes, const uint8_t *secret, uint64_t sum) {
    for (int pair = 0; pair < 8; pair += 2)
        sum += multiply_and_fold(
            lanes[pair] ^ take_word(secret + 8 * pair), lanes[pair + 1] ^ take_word(secret + 8 * pair + 8)
        );
    sum = (sum ^ sum >> 37) * 0x165667919e3779f9u;
    return sum ^ sum >> 32;
}

// `sum` gets the SUM_BYTES of a content, of which the lower half comes first. form: in ADD_CONTENT.
static void sum_content(const uint8_t *at, long bytes, uint8_t *sum, int form) {
    uint64_t lanes[8] = {X32_3, XX1, XX2, XX3, XX4, X32_2, XX5, X32_1};
    uint8_t padded[LEAST_SUMMED];
    if (bytes < LEAST_SUMMED) {
        memset(padded, 0, LEAST_SUMMED);
        memcpy(padded, at, (size_t)bytes);
        at = padded, bytes = LEAST_SUMMED;
    }
    ADD_CONTENT[form](lanes, at, bytes);
    const uint64_t low = merge_lanes(lanes, SECRET + MERGED_WITH, (uint64_t)bytes * XX1);
    const uint64_t high = merge_lanes(lanes, SECRET + MERGED_LAST_WITH, ~((uint64_t)bytes * XX2));
    memcpy(sum, &low, 8);
    memcpy(sum + 8, &high, 8);
}

// `sums` gets the sums of the blocks of a content. form: in ADD_CONTENT; below 0 for the quickest. Returns 0, or -1 if this
// processor has no such form.
int rekindle_sum_blocks(const uint8_t *data, long content, long block, uint8_t *sums, int form) {
    const int quickest = find_form();
    if (form > quickest) return -1;
    for (long at = 0; at < content; at += block, sums += SUM_BYTES)
        sum_content(data + at, content - at < block ? content - at : block, sums, form < 0 ? quickest : form);
    return 0;
}

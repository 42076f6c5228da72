// Products of bfloat16 rows and weights in the arithmetic of AMX's instruction for tiles (`tdpbf16ps`), on processors that
// have it: level 4. It is another arithmetic than that of tiles.h, the same for any number of rows: many go through tiles,
// few through AVX-512.
//
// An output is a sum over blocks of 32 terms, in ascending order, from zero. Of a block, the even terms are one chain of
// fused multiply-adds from zero and the odd terms another one. Both are added, and then added to the sum. Numbers too
// small to be normal are zeros, operands and results alike. A product may be set down and continued between two blocks.
//
// Rows and weights are words of 32 bits here, a pair of bfloat16 each: `x` has `stride` words from row to row, and a panel
// has 32 words for every pair of terms, one of each output. That is how tiles read weights as well.

#define BLOCK 16 // words of a block
#define TILE_ROWS 16 // of a tile
#define LEAST_TILED 3 // rows: with fewer, AVX-512 reads the weights as fast as tiles or faster

#define FOR_BLOCKS __attribute__((target("avx512f,avx2,fma,prefer-vector-width=512")))
#define EVEN(words) _mm512_castsi512_ps(_mm512_slli_epi32(words, 16))
#define ODD(words) _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)))

static inline __attribute__((always_inline)) FOR_BLOCKS void block_tile(
    const int R, const int P, const uint32_t *x, long stride, const char *w, long apart, long words, float *sums,
    long width, int on
) {
    for (long k = 0; k < words;) {
        const long stop = k + BLOCK < words ? k + BLOCK : words;
        const int adds = on || k;
        __m512 chain[4][4][2][2];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) chain[r][p][half][0] = chain[r][p][half][1] = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (; k < stop; k++, w += 128) {
            __m512i pair[4];
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) pair[r] = _mm512_set1_epi32((int)x[r * stride + k]);
#pragma GCC unroll 16
            for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const char *const at = w + p * apart + 64 * half;
                    const __m512i of_panel = _mm512_loadu_si512(at);
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++) {
                        __m512 *const both = chain[r][p][half];
                        both[0] = _mm512_fmadd_ps(EVEN(pair[r]), EVEN(of_panel), both[0]);
                        both[1] = _mm512_fmadd_ps(ODD(pair[r]), ODD(of_panel), both[1]);
                    }
                }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    float *const to = sums + r * width + p * 32 + 16 * half;
                    const __m512 sum = adds ? _mm512_loadu_ps(to) : _mm512_setzero_ps();
                    _mm512_storeu_ps(to, _mm512_add_ps(sum, _mm512_add_ps(chain[r][p][half][0], chain[r][p][half][1])));
                }
    }
}

#define ONE_BLOCK(R, P) (void)unit, block_tile(R, P, x, stride, w, apart, words, sums, width, on);
#define ON_BLOCKS(R, P) OF_ROWS(R, P, 1, 1, ONE_BLOCK)

// As many of the rows as go together; returns how many.
static __attribute__((noinline)) FOR_BLOCKS long some_blocks(
    long rows, int panels, const uint32_t *x, long stride, const char *w, long apart, long words, float *sums, long width,
    int on
) {
    ON_BLOCKS(4, 1) ON_BLOCKS(3, 1) ON_BLOCKS(2, 2) ON_BLOCKS(1, 4)
    return 0;
}

static void multiply_blocks(
    long rows, int panels, const uint32_t *x, long stride, const char *w, long apart, long words, float *sums, long width,
    int on
) {
    const unsigned before = without_subnormals();
    for (long done = 0; done < rows;)
        done += some_blocks(rows - done, panels, x + done * stride, stride, w, apart, words, sums + done * width, width, on);
    as_before(before);
}

static int tiles_serve; // the processor has tiles, the system lets this process use them, and they add as blocks do

#ifdef TILED
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FOR_TILES __attribute__((noinline, target("amx-tile,amx-bf16")))
#define REQUEST_PERMISSION 0x1023 // of arch_prctl
#define TILE_DATA 18              // the feature of the processor's state

// Tiles 0 to 3 hold sums of two times two tiles of rows and outputs, 4 and 5 rows, 6 and 7 weights.
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shapes_t;

static FOR_TILES void shape_tiles(long rows) {
    const uint8_t upper = (uint8_t)(rows < TILE_ROWS ? rows : TILE_ROWS), lower = (uint8_t)(rows - upper);
    const tile_shapes_t shapes = {
        .palette = 1,
        .bytes = {64, 64, lower ? 64 : 0, lower ? 64 : 0, 64, lower ? 64 : 0, 64, 64},
        .rows = {upper, upper, lower, lower, upper, lower, BLOCK, BLOCK},
    };
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(&shapes);
}

// Up to 16 rows, or up to 32 where there are lower tiles, with one panel. words: whole blocks.
static FOR_TILES void tile_upper(const uint32_t *x, long stride, const char *w, long words, float *sums, long width, int on) {
    __asm__ volatile("" ::: "memory"); // intrinsics for tiles do not say that they read memory
    if (on) {
        _tile_loadd(0, sums, width * 4);
        _tile_loadd(1, sums + 16, width * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    for (long k = 0; k < words; k += BLOCK, w += 128 * BLOCK) {
        _tile_loadd(4, x + k, stride * 4);
        _tile_loadd(6, w, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 64, 128);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums, width * 4);
    _tile_stored(1, sums + 16, width * 4);
}

static FOR_TILES void tile_both(const uint32_t *x, long stride, const char *w, long words, float *sums, long width, int on) {
    const uint32_t *const below = x + TILE_ROWS * stride;
    float *const sums_below = sums + TILE_ROWS * width;
    __asm__ volatile("" ::: "memory");
    if (on) {
        _tile_loadd(0, sums, width * 4);
        _tile_loadd(1, sums + 16, width * 4);
        _tile_loadd(2, sums_below, width * 4);
        _tile_loadd(3, sums_below + 16, width * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = 0; k < words; k += BLOCK, w += 128 * BLOCK) {
        _tile_loadd(4, x + k, stride * 4);
        _tile_loadd(6, w, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 64, 128);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, below + k, stride * 4);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, width * 4);
    _tile_stored(1, sums + 16, width * 4);
    _tile_stored(2, sums_below, width * 4);
    _tile_stored(3, sums_below + 16, width * 4);
}

static FOR_TILES void release_tiles(void) { _tile_release(); }

static void multiply_whole_blocks(
    long rows, int panels, const uint32_t *x, long stride, const char *w, long apart, long words, float *sums, long width,
    int on
) {
    const long most = 2 * TILE_ROWS, last = rows % most ? rows % most : most;
    if (rows >= most) {
        shape_tiles(most);
        for (int p = 0; p < panels; p++)
            for (long row = 0; row + most <= rows; row += most)
                tile_both(x + row * stride, stride, w + p * apart, words, sums + row * width + p * 32, width, on);
    }
    if (last < most) {
        const long row = rows - last;
        shape_tiles(last);
        for (int p = 0; p < panels; p++)
            (last > TILE_ROWS ? tile_both : tile_upper)(
                x + row * stride, stride, w + p * apart, words, sums + row * width + p * 32, width, on
            );
    }
    release_tiles();
}

static int system_allows_tiles(void) {
    uint32_t a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 1) == 0 || (d >> 24 & 1) == 0) return 0; // bf16, tiles
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#else
static void multiply_whole_blocks(
    long rows, int panels, const uint32_t *x, long stride, const char *w, long apart, long words, float *sums, long width,
    int on
) {
    multiply_blocks(rows, panels, x, stride, w, apart, words, sums, width, on);
}

static int system_allows_tiles(void) { return 0; }
#endif

// As multiply_t. `form` is FLOATS: words are moved as floats are.
static void multiply_amx(
    long rows, int panels, int form, const float *x, long stride, const char *w, long apart, long terms, float *sums,
    long width, int on
) {
    const uint32_t *const words = (const uint32_t *)x;
    const long whole = tiles_serve && rows >= LEAST_TILED ? terms / BLOCK * BLOCK : 0;
    (void)form;
    if (whole) multiply_whole_blocks(rows, panels, words, stride, w, apart, whole, sums, width, on);
    if (whole < terms)
        multiply_blocks(
            rows, panels, words + whole, stride, w + whole * 128, apart, terms - whole, sums, width, on || whole > 0
        );
}

// What attention makes of its operands for such products. A float32 becomes the sum of two bfloat16: the nearest one,
// and the one nearest to what that lacks. So a product with keys or values in bfloat16 is two products, added in one sum.
static FOR_BLOCKS void split_floats(const float *restrict from, long count, uint16_t *restrict upper, uint16_t *restrict lower) {
    for (long i = 0; i < count; i++) {
        upper[i] = rounded(from[i]);
        lower[i] = rounded(from[i] - widened(upper[i]));
    }
}

#define UPPER_OF(words) _mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000))
#define PAIR_OF(one, other) _mm512_or_si512(_mm512_srli_epi32(one, 16), UPPER_OF(other))
#define NEAREST(words) _mm512_add_epi32(words, _mm512_set1_epi32(0x8000)) // its upper half; of two the larger one
#define REST_OF(words, upper)                                                                                          \
    _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(words), _mm512_castsi512_ps(UPPER_OF(upper))))

// 2^x of numbers that are not above zero, within two units in the last place (the polynomial of Cephes' exp2f). Zero where
// that is no normal number, and NaN of NaN.
static inline __attribute__((always_inline)) FOR_BLOCKS __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x); // of what is no number the second operand
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT), r = _mm512_sub_ps(x, whole);
    __m512 found = _mm512_set1_ps(1.535336188319500e-4f);
    found = _mm512_fmadd_ps(found, r, _mm512_set1_ps(1.339887440266574e-3f));
    found = _mm512_fmadd_ps(found, r, _mm512_set1_ps(9.618437357674640e-3f));
    found = _mm512_fmadd_ps(found, r, _mm512_set1_ps(5.550332471162809e-2f));
    found = _mm512_fmadd_ps(found, r, _mm512_set1_ps(2.402264791363012e-1f));
    found = _mm512_fmadd_ps(found, r, _mm512_set1_ps(6.931472028550421e-1f));
    found = _mm512_fmadd_ps(found, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(found, whole);
}

// Lane 0 has the sum of all lanes, added up in pairs as ON(summed) does.
static inline __attribute__((always_inline)) FOR_BLOCKS float sum_lanes(__m512 sums) {
    sums = _mm512_add_ps(sums, _mm512_shuffle_f32x4(sums, sums, 0x4e));
    sums = _mm512_add_ps(sums, _mm512_shuffle_f32x4(sums, sums, 0xb1));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0x4e));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0xb1));
    return _mm512_cvtss_f32(sums);
}

static inline __attribute__((always_inline)) FOR_BLOCKS float greatest_lane(__m512 most) {
    most = _mm512_max_ps(most, _mm512_shuffle_f32x4(most, most, 0x4e));
    most = _mm512_max_ps(most, _mm512_shuffle_f32x4(most, most, 0xb1));
    most = _mm512_max_ps(most, _mm512_permute_ps(most, 0x4e));
    most = _mm512_max_ps(most, _mm512_permute_ps(most, 0xb1));
    return _mm512_cvtss_f32(most);
}

// As ON(weigh), but weights are split, in place: KEYS / 2 words of upper halves, and as many of lower ones. A word has two
// keys that are 16 apart, which takes fewer instructions than neighbours. Subnormal numbers are zeros here.
static FOR_BLOCKS void weigh_split(float *scores, long low, long high, long count, float *found) {
    const __m512 none = _mm512_set1_ps(-INFINITY);
    __m512 of[KEYS / 16], most = none, sums = _mm512_setzero_ps();
    const long stop = high < count ? high : count;
#pragma GCC unroll 8
    for (int i = 0; i < KEYS / 16; i++) {
        const long first = low - 16 * i, last = stop - 16 * i;
        of[i] = none;
        if (last <= 0 || first >= 16) continue;
        const __mmask16 seen = (__mmask16)((last < 16 ? (1u << last) - 1 : 0xffff) & (first > 0 ? 0xffffu << first : 0xffff));
        of[i] = _mm512_mask_loadu_ps(none, seen, scores + 16 * i);
        most = _mm512_max_ps(of[i], most); // what is no number is left out
    }
    found[0] = greatest_lane(most);
    most = _mm512_set1_ps(found[0]);
#pragma GCC unroll 4
    for (int i = 0; i < KEYS / 32; i++) {
        __m512i nearest[2], rest[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512 weights = power_of_two(
                _mm512_mul_ps(_mm512_sub_ps(of[2 * i + half], most), _mm512_set1_ps(1.44269504088896341f))
            );
            sums = _mm512_add_ps(sums, weights);
            nearest[half] = NEAREST(_mm512_castps_si512(weights));
            rest[half] = NEAREST(REST_OF(_mm512_castps_si512(weights), nearest[half]));
        }
        _mm512_storeu_si512(scores + 16 * i, PAIR_OF(nearest[0], nearest[1]));
        _mm512_storeu_si512(scores + KEYS / 2 + 16 * i, PAIR_OF(rest[0], rest[1]));
    }
    found[1] = sum_lanes(sums);
}

// 16 rows' words from `from` on, `width` words apart -> 16 rows of one word of each, 32 words apart. rows, columns: of those
// that are there; zeros stand for missing rows.
static inline __attribute__((always_inline)) FOR_BLOCKS void turn_square(
    const uint32_t *from, long width, long rows, long columns, uint32_t *to
) {
    __m512i r[16], t[16];
    const __mmask16 there = (__mmask16)(columns < 16 ? (1u << columns) - 1 : 0xffff);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = i < rows ? _mm512_maskz_loadu_epi32(there, from + i * width) : _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i first = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x44), second = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xee);
        const __m512i third = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x44);
        const __m512i fourth = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xee);
        t[i] = _mm512_shuffle_i32x4(first, third, 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(first, third, 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(second, fourth, 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(second, fourth, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        if (i < columns) _mm512_storeu_si512(to + 32 * i, t[i]);
}

// keys: `count` rows of `words` words -> panels of 32 keys, [panels, words, 32]; zeros for keys that are not there.
static FOR_BLOCKS void turn_words(const uint32_t *keys, long words, long count, uint32_t *panels) {
    for (long first = 0; first < count; first += 32, panels += 32 * words)
        for (long half = 0; half < 32; half += 16)
            for (long start = 0; start < words; start += 16)
                turn_square(
                    keys + (first + half) * words + start, words, count - first - half, words - start,
                    panels + start * 32 + half
                );
}

// values: `count` rows of `size` numbers -> panels of 32 of these, [panels, pairs, 32]. A word has the numbers of two rows,
// as weigh_split has it. pairs: whole blocks, zeros where no row is.
static FOR_BLOCKS void pair_rows(const uint16_t *values, long size, long count, long pairs, uint32_t *panels) {
    static const uint16_t none[WIDEST];
    for (long start = 0; start < size; start += 32, panels += 32 * pairs) {
        const long there = size - start < 32 ? size - start : 32;
        if (there < 32) memset(panels, 0, (size_t)pairs * 32 * sizeof(uint32_t));
        for (long pair = 0; pair < pairs; pair++) {
            const long row = pair / BLOCK * 2 * BLOCK + pair % BLOCK;
            const uint16_t *const first = row < count ? values + row * size + start : none;
            const uint16_t *const second = row + BLOCK < count ? values + (row + BLOCK) * size + start : none;
            uint32_t *const to = panels + 32 * pair;
            if (there == 32)
                for (long i = 0; i < 32; i++) to[i] = (uint32_t)first[i] | (uint32_t)second[i] << 16;
            else
                for (long i = 0; i < there; i++) to[i] = (uint32_t)first[i] | (uint32_t)second[i] << 16;
        }
    }
}

// Rows that were split, the lower part `apart` words behind the upper one, with panels of pairs.
static void multiply_split(
    long rows, int panels, const float *x, long stride, long apart, const float *w, long words, float *sums, long width
) {
    for (int part = 0; part < 2; part++)
        multiply_amx(
            rows, panels, FLOATS, x + part * apart, stride, (const char *)w, words * 128, words, sums, width, part
        );
}

#define COMPARED 32 // rows; and twice as many terms

// Whether tiles add as blocks do, which Intel documents, but other makers need not. Numbers are of many magnitudes; in some
// rounds sums come near to what is no normal number, in some near to infinity.
static int tiles_agree(void) {
    static const int smallest[] = {110, 50, 110, 164};
    uint16_t x[COMPARED * 2 * COMPARED], w[32 * 2 * COMPARED];
    float blocks[COMPARED * 32], tiles[COMPARED * 32];
    uint32_t state = 1;
    for (int round = 0; round < 64; round++) {
        for (int i = 0; i < (COMPARED + 32) * 2 * COMPARED; i++) {
            state = state * 1664525 + 1013904223;
            const uint16_t one = (state >> 16 & 0x807f) | (uint16_t)(smallest[round % 4] + (state >> 8 & 31)) << 7;
            if (i < COMPARED * 2 * COMPARED) x[i] = one;
            else w[i - COMPARED * 2 * COMPARED] = one;
        }
        const long rows = round % COMPARED + 1;
        multiply_blocks(rows, 1, (const uint32_t *)x, COMPARED, (const char *)w, 0, COMPARED, blocks, 32, 0);
        multiply_whole_blocks(rows, 1, (const uint32_t *)x, COMPARED, (const char *)w, 0, COMPARED, tiles, 32, 0);
        if (memcmp(tiles, blocks, (size_t)rows * 32 * sizeof(float))) return 0;
    }
    return 1;
}

// Whether products of level 4 go through tiles. Called once, before the first of them.
static int find_tiles(void) {
    tiles_serve = system_allows_tiles() && tiles_agree();
    return tiles_serve;
}

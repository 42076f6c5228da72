// Products with packed weights by tiles of rows and outputs, in the instructions that the including file names: besides
// what tiles.h needs, BYTES, HALF_FLOATS and BRAIN_FLOATS (LANES numbers from memory as floats), EIGHTHS (of E4M3, 256th
// of the value), TABLE (16 floats), NIBBLE (what the lowest four bits of words stand for), NEXT, and PACKED_TILES.
//
// A number of a weight is step * scale - least; scales and what is least belong to groups of a row's terms. Of each group
// an output has a chain over its steps, fma(x[k], step[k], ...) over ascending k, from zero, and takes it in as
// fma(scale, chain, sum), then fma(least, -(sum of the group's x), sum). So nothing depends on the number of rows.

// One level of scales: LANES of them from `at` on. kind: how they are stored.
static inline __attribute__((always_inline)) FOR V ON(scales)(const char *at, long from, int kind) {
    return kind == HALVES_16 ? HALF_FLOATS(at + 2 * from) : kind == BRAINS_16 ? BRAIN_FLOATS(at + 2 * from) : LOAD((const float *)at + from);
}

// Of LANES outputs: what steps are multiplied with, and what is subtracted of each, before the factors of a group.
static inline __attribute__((always_inline)) FOR void ON(outer_levels)(
    const packed_t *form, const char *outer, long lane, V *scale, V *least
) {
    const V first = ON(scales)(outer, lane, form->scale);
    const char *const second = outer + (form->scale == FLOATS_32 ? 128 : 64);
    *scale = form->kind == EIGHT_FLOATING ? MUL(first, SPREAD(256.0f)) : first;
    *least = form->least == OWN || form->least == ALONE ? ON(scales)(second, lane, form->scale) : first;
}

// The same with the factors of a group.
static inline __attribute__((always_inline)) FOR void ON(inner_levels)(
    const packed_t *form, const char *inner, long lane, V *scale, V *least
) {
    if (form->inner) *scale = MUL(*scale, BYTES(inner + lane));
    if (form->least == OWN || form->least == OF_SCALE) *least = MUL(*least, BYTES(inner + (form->inner ? 32 : 0) + lane));
}

static inline __attribute__((always_inline)) FOR void ON(levels)(
    const packed_t *form, const char *outer, const char *inner, long lane, V *scale, V *least
) {
    ON(outer_levels)(form, outer, lane, scale, least);
    ON(inner_levels)(form, inner, lane, scale, least);
}

// Bytes of what stands before the groups of a record, and before the steps of a group.
static inline __attribute__((always_inline)) long ON(outer_bytes)(const packed_t *form) {
    return (form->scale == FLOATS_32 ? 128 : 64) * (form->least == OWN || form->least == ALONE ? 2 : 1);
}

static inline __attribute__((always_inline)) long ON(inner_bytes)(const packed_t *form) {
    return (form->inner ? 32 : 0) + (form->least == OWN || form->least == OF_SCALE ? 32 : 0);
}

// One panel's records as floats: of each group 32 scales, 32 numbers that are least where there are any, and its steps.
static FOR void ON(expand)(const packed_t *form, const char *w, long spans, float *to) {
    const TABLE_OF(table, form->table);
    for (long span = 0; span < spans; span++, w += form->record) {
        const char *inner = w + ON(outer_bytes)(form);
        for (long part = 0; part < form->per; part++) {
            const char *const steps = inner + ON(inner_bytes)(form);
            float *const values = to + (form->least ? 64 : 32);
            for (long lane = 0; lane < 32; lane += LANES) {
                V scale, least;
                ON(levels)(form, w, inner, lane, &scale, &least);
                STORE(to + lane, scale);
                if (form->least) STORE(to + 32 + lane, least);
                if (form->kind == FOUR)
                    for (long k = 0; k < form->group; k += 8) {
                        W words = WORDS_AT(steps + 16 * k + 4 * lane);
                        for (int j = 0; j < 8; j++, words = NEXT(words)) {
                            const V found = NIBBLE(words, table);
                            STORE(values + 32 * (k + j) + lane, found);
                        }
                    }
                else
                    for (long k = 0; k < form->group; k++) {
                        const char *const at = steps + 32 * k + lane;
                        V found;
                        if (form->kind == EIGHT) found = BYTES(at);
                        else found = EIGHTHS(at);
                        STORE(values + 32 * k + lane, found);
                    }
            }
            inner = steps + form->group * (form->kind == FOUR ? 16 : 32);
            to = values + 32 * form->group;
        }
    }
}

// w: of each panel `spans` records. sums: rows `width` floats apart. added: x added up by groups, rows `groups` apart.
static inline __attribute__((always_inline)) FOR void ON(packed_tile)(
    const int R, const int P, const int kind, const packed_t *form, const float *x, long stride, const char *w,
    long apart, long spans, float *sums, long width, const int unit, int on, const float *added, long groups
) {
    const float *const of[4] = {x, x + 3 * stride, x + 6 * stride, x + 9 * stride};
    const long group = form->group, size = kind == FOUR ? 16 : kind == EXPANDED ? 128 : 32;
    const int at = unit * LANES;
    const TABLE_OF(table, form->table);
    for (long span = 0, k = 0, number = 0; span < spans; span++) {
        const char *const outer = w + span * form->record;
        const char *after = outer + ON(outer_bytes)(form);
        for (long part = 0; part < form->per; part++, number++) {
            const char *const inner = after, *steps = inner + ON(inner_bytes)(form);
            after = steps + group * size;
            V chain[12][4][2];
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
#pragma GCC unroll 16
                for (int p = 0; p < P; p++) chain[r][p][0] = chain[r][p][1] = ZERO();
            for (long stop = k + group; k < stop; k += 8, steps += 8 * size) {
                W words[4][2];
                if (kind == FOUR) {
#pragma GCC unroll 16
                    for (int p = 0; p < P; p++) {
                        const char *const here = steps + p * apart;
                        words[p][0] = WORDS_AT(here + 4 * at);
                        words[p][1] = WORDS_AT(here + 4 * (at + 16));
                        __builtin_prefetch(here + AHEAD);
                        __builtin_prefetch(here + AHEAD + 64);
                    }
                }
#pragma GCC unroll 2
                for (int j = 0; j < 8; j++) {
                    V low[4], high[4];
#pragma GCC unroll 16
                    for (int p = 0; p < P; p++) {
                        const char *const here = steps + p * apart + 32 * j + at;
                        if (kind == EXPANDED) {
                            const float *const values = (const float *)(steps + p * apart) + 32 * j + at;
                            low[p] = LOAD(values);
                            high[p] = LOAD(values + 16);
                        } else if (kind == FOUR) {
                            low[p] = NIBBLE(words[p][0], table);
                            high[p] = NIBBLE(words[p][1], table);
                            words[p][0] = NEXT(words[p][0]);
                            words[p][1] = NEXT(words[p][1]);
                        } else if (kind == EIGHT_FLOATING) {
                            low[p] = EIGHTHS(here);
                            high[p] = EIGHTHS(here + 16);
                        } else {
                            if (j % 2 == 0) __builtin_prefetch(here + AHEAD);
                            low[p] = BYTES(here);
                            high[p] = BYTES(here + 16);
                        }
                    }
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++) {
                        const V one = SPREAD(of[r / 3][r % 3 * stride + k + j]);
#pragma GCC unroll 16
                        for (int p = 0; p < P; p++) {
                            chain[r][p][0] = FMA(one, low[p], chain[r][p][0]);
                            chain[r][p][1] = FMA(one, high[p], chain[r][p][1]);
                        }
                    }
                }
            }
#pragma GCC unroll 16
            for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const long lane = at + 16 * half;
                    V scale, least;
                    ON(levels)(form, outer + p * apart, inner + p * apart, lane, &scale, &least);
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++) {
                        float *const to = sums + r * width + p * 32 + lane;
                        V sum = on || number ? LOAD(to) : ZERO();
                        sum = FMA(scale, chain[r][p][half], sum);
                        if (form->least) sum = FMA(least, SPREAD(-added[r * groups + number]), sum);
                        STORE(to, sum);
                    }
                }
        }
    }
}

#define ON_KIND(R, P, KIND)                                                                                            \
    ON(packed_tile)(R, P, KIND, form, x, stride, w, apart, spans, sums, width, unit, on, added, groups)

#define ON_FORM(R, P)                                                                                                  \
    if ((R) <= 4 && form->kind == FOUR) ON_KIND(R, P, FOUR);                                                           \
    else if ((R) <= 4 && form->kind == EIGHT) ON_KIND(R, P, EIGHT);                                                    \
    else if ((P) == 1 && (R) <= 4 && form->kind == EIGHT_FLOATING) ON_KIND(R, 1, EIGHT_FLOATING);                      \
    else if ((P) == 1) ON_KIND(R, 1, EXPANDED);

#define ON_TILE(R, P) OF_ROWS(R, P, 1, form->kind != EIGHT_FLOATING, ON_FORM)

// As many of the rows as go together; returns how many.
static __attribute__((noinline)) FOR long ON(some_packed)(
    long rows, int panels, const packed_t *form, const float *x, long stride, const char *w, long apart, long spans,
    float *sums, long width, int on, const float *added, long groups
) {
    PACKED_TILES
    return 0;
}

static FOR void ON(multiply_packed)(
    long rows, int panels, const packed_t *form, const float *x, long stride, const char *w, long apart, long spans,
    float *sums, long width, int on, const float *added, long groups
) {
    for (long done = 0; done < rows;)
        done += ON(some_packed)(
            rows - done, panels, form, x + done * stride, stride, w, apart, spans, sums + done * width, width, on,
            added + done * groups, groups
        );
}

#undef ON_KIND
#undef ON_FORM
#undef ON_TILE

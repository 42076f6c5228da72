// Products of packed weights with rows in fixed point, in the instructions that the including file names: besides what
// steps.h needs, FOR_FIXED (attributes), DOT (pairs of 16 bits multiplied and added to words), PAIR_AT (two of a row, in
// every lane), EVENS and ODDS (bytes 0 and 2, 1 and 3 of words as pairs), NIBBLES, PLACES (16 bytes that steps of four bits
// stand for), PLACED (what the low halves of bytes stand for), SPREAD_WORD, WHOLE (words as floats), and FIXED_TILES. Where it
// has vectors also ALL_OF (some bits of words), TOPS (the highest four bits of each half of words), ADDED (words) and DOWN
// (words shifted with their sign).
//
// The terms of a row that belong to one group of the weight become 16-bit integers: multiples of a power of two that
// follows from the greatest of them, each rounded to the nearest. Sums of their products with steps are exact, so their
// order does not matter. A group is added as fma(scale * unit, sum, ...), then fma(least, -(sum of the group's terms),
// ...). Steps are stored with an offset so that none is negative, and a group's sum begins with minus that offset's share.
// Of eight terms 0 and 4, 1 and 5, 2 and 6, 3 and 7 are paired, in rows as in steps.

// What a row of bfloat16 becomes. to: as many numbers. of: one for each group.
static FOR void ON(fix)(const packed_t *form, const uint16_t *x, long terms, int16_t *to, fixed_t *of) {
    for (long k = 0; k < terms; k += form->group, of++) {
        uint16_t most = 0;
        for (long i = 0; i < form->group; i++) {
            const uint16_t bits = x[k + i] & 0x7fff;
            most = bits > most ? bits : most;
        }
        const uint32_t found = most >> 7, exponent = found < 15 ? 15 : found; // smaller ones would have a unit that is none
        const float up = found == 255 ? 0.0f : float_of((268 - exponent) << 23); // the greatest is between 2^14 and 2^15
        uint32_t numbers[128];
        int32_t sum = 0;
        for (long i = 0; i < form->group; i++)
            numbers[i] = bits_of(widened(x[k + i]) * up + 12582912.0f) - bits_of(12582912.0f);
        for (long i = 0; i < form->group; i++) sum += (int16_t)numbers[i];
        for (long i = 0; i < form->group; i += 8)
            for (long j = 0; j < 4; j++) {
                const uint32_t pair = (numbers[i + j] & 0xffff) | numbers[i + j + 4] << 16;
                memcpy(to + k + i + 2 * j, &pair, sizeof pair);
            }
        const float unit = found == 255 ? __builtin_nanf("") : float_of((exponent - 14) << 23);
        *of = (fixed_t){unit, (float)sum * unit, -sum * form->raised};
    }
}

// w: of each panel `spans` records. x: rows `stride` numbers apart; of: what their groups are, rows `groups` apart. sums:
// rows `width` floats apart.
static inline __attribute__((always_inline)) FOR_FIXED void ON(fixed_tile)(
    const int R, const int P, const int kind, const packed_t *form, const int16_t *x, long stride, const char *w,
    long apart, long spans, float *sums, long width, const int unit, int on, const fixed_t *of, long groups
) {
    const int16_t *const rows[4] = {x, x + 3 * stride, x + 6 * stride, x + 9 * stride};
    const long group = form->group, size = kind == FIXED_EIGHT ? 32 : 16;
    const int at = unit * LANES;
    const PLACES(places, form->places);
    for (long span = 0, k = 0, number = 0; span < spans; span++) {
        const char *const outer = w + span * form->record;
        const char *after = outer + ON(outer_bytes)(form);
        for (long part = 0; part < form->per; part++, number++) {
            const char *const inner = after, *steps = inner + ON(inner_bytes)(form);
            after = steps + group * size;
            W chain[12][4][2];
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
#pragma GCC unroll 16
                for (int p = 0; p < P; p++) chain[r][p][0] = chain[r][p][1] = SPREAD_WORD(of[r * groups + number].start);
            for (long stop = k + group; k < stop; k += 8, steps += 8 * size) {
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    W low[4], high[4];
#pragma GCC unroll 16
                    for (int p = 0; p < P; p++) {
                        const char *const here = steps + p * apart + 4 * at + (kind == FIXED_EIGHT ? j / 2 * 128 : 0);
                        const W one = WORDS_AT(here), other = WORDS_AT(here + 64);
                        if (j % 2 == 0 && (kind == FIXED_EIGHT || j == 0)) {
                            __builtin_prefetch(here + AHEAD);
                            __builtin_prefetch(here + AHEAD + 64);
                        }
                        if (kind == FIXED_FOUR) {
                            low[p] = NIBBLES(one, j);
                            high[p] = NIBBLES(other, j);
                        } else if (kind == FIXED_EIGHT) {
                            low[p] = j % 2 ? ODDS(one) : EVENS(one);
                            high[p] = j % 2 ? ODDS(other) : EVENS(other);
                        } else { // bytes of the low halves are terms 0, 2, 4, 6
                            const W first = PLACED(one, j % 2, places), second = PLACED(other, j % 2, places);
                            low[p] = j / 2 ? ODDS(first) : EVENS(first);
                            high[p] = j / 2 ? ODDS(second) : EVENS(second);
                        }
                    }
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++) {
                        const W pair = PAIR_AT(rows[r / 3] + r % 3 * stride + k + 2 * j);
#pragma GCC unroll 16
                        for (int p = 0; p < P; p++) {
                            chain[r][p][0] = DOT(chain[r][p][0], low[p], pair);
                            chain[r][p][1] = DOT(chain[r][p][1], high[p], pair);
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
                        const fixed_t *const own = of + r * groups + number;
                        float *const to = sums + r * width + p * 32 + lane;
                        V sum = on || number ? LOAD(to) : ZERO();
                        sum = FMA(MUL(scale, SPREAD(own->unit)), WHOLE(chain[r][p][half]), sum);
                        if (form->least) sum = FMA(least, SPREAD(-own->added), sum);
                        STORE(to, sum);
                    }
                }
        }
    }
}

#ifdef ALL_OF
// One row with one panel of four bits. A step of a pair lies in bits 0, 4, 8 or 12 of its half of a word. The first three
// are multiplied where they lie, which saves shifts; their sums are 1, 16 and 256 times what they should be. The sum of
// FOLDED terms stays below 2^31: 8 products of 15 * 256 and 2^15. A weight of Q4_K takes 15 to 20 % less with AVX-512 and 20 to
// 28 % less with AVX2, and a whole decode step of Q4_K_M 10 % less (Xeon with AMX, one thread).
#define FOLDED 32
static inline __attribute__((always_inline)) FOR_FIXED void ON(row_of_four)(
    const packed_t *form, const int16_t *x, const char *w, long spans, float *sums, const int unit, int on, const fixed_t *of
) {
    const long group = form->group;
    const int at = unit * LANES;
    V sum[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) sum[half] = on ? LOAD(sums + at + 16 * half) : ZERO();
    for (long span = 0; span < spans; span++) {
        const char *const outer = w + span * form->record;
        const char *steps = outer + ON(outer_bytes)(form);
        V scales[2], leasts[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) ON(outer_levels)(form, outer, at + 16 * half, &scales[half], &leasts[half]);
        for (long part = 0; part < form->per; part++, of++) {
            const char *const inner = steps;
            W total[2];
            steps += ON(inner_bytes)(form);
            total[0] = total[1] = SPREAD_WORD(of->start);
            for (long left = group; left > 0; left -= FOLDED) {
                W chain[4][2];
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) chain[j][0] = chain[j][1] = SPREAD_WORD(0);
#pragma GCC unroll 4
                for (long k = 0; k < FOLDED && k < left; k += 8, x += 8, steps += 128) {
                    __builtin_prefetch(steps + AHEAD);
                    __builtin_prefetch(steps + AHEAD + 64);
#pragma GCC unroll 2
                    for (int half = 0; half < 2; half++) {
                        const W words = WORDS_AT(steps + 4 * at + 64 * half);
                        chain[0][half] = DOT(chain[0][half], ALL_OF(words, 0x000f000f), PAIR_AT(x));
                        chain[1][half] = DOT(chain[1][half], ALL_OF(words, 0x00f000f0), PAIR_AT(x + 2));
                        chain[2][half] = DOT(chain[2][half], ALL_OF(words, 0x0f000f00), PAIR_AT(x + 4));
                        chain[3][half] = DOT(chain[3][half], TOPS(words), PAIR_AT(x + 6));
                    }
                }
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const W some = ADDED(ADDED(chain[0][half], chain[3][half]), DOWN(chain[1][half], 4));
                    total[half] = ADDED(total[half], ADDED(some, DOWN(chain[2][half], 8)));
                }
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                V scale = scales[half], least = leasts[half];
                ON(inner_levels)(form, inner, at + 16 * half, &scale, &least);
                sum[half] = FMA(MUL(scale, SPREAD(of->unit)), WHOLE(total[half]), sum[half]);
                if (form->least) sum[half] = FMA(least, SPREAD(-of->added), sum[half]);
            }
        }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) STORE(sums + at + 16 * half, sum[half]);
}
#undef FOLDED
#define IN_PLACE(R, P)                                                                                                 \
    if ((R) == 1 && form->kind == FIXED_FOUR)                                                                          \
        for (int p = 0; p < (P); p++)                                                                                  \
            ON(row_of_four)(form, x, w + p * apart, spans, sums + 32 * p, unit, on, of);                               \
    else
#else
#define IN_PLACE(R, P)
#endif

#define ON_KIND(R, P, KIND)                                                                                            \
    ON(fixed_tile)(R, P, KIND, form, x, stride, w, apart, spans, sums, width, unit, on, of, groups)

#define ON_FORM(R, P)                                                                                                  \
    IN_PLACE(R, P)                                                                                                     \
    if (form->kind == FIXED_FOUR) ON_KIND(R, P, FIXED_FOUR);                                                       \
    else if (form->kind == FIXED_EIGHT) ON_KIND(R, P, FIXED_EIGHT);                                                    \
    else ON_KIND(R, P, FIXED_PLACES);

#define ON_TILE(R, P) OF_ROWS(R, P, 1, form->kind != FIXED_PLACES, ON_FORM)

// As many of the rows as go together; returns how many.
static __attribute__((noinline)) FOR_FIXED long ON(some_fixed)(
    long rows, int panels, const packed_t *form, const int16_t *x, long stride, const char *w, long apart, long spans,
    float *sums, long width, int on, const fixed_t *of, long groups
) {
    FIXED_TILES
    return 0;
}

static FOR_FIXED void ON(multiply_fixed)(
    long rows, int panels, const packed_t *form, const int16_t *x, long stride, const char *w, long apart, long spans,
    float *sums, long width, int on, const fixed_t *of, long groups
) {
    for (long done = 0; done < rows;)
        done += ON(some_fixed)(
            rows - done, panels, form, x + done * stride, stride, w, apart, spans, sums + done * width, width, on,
            of + done * groups, groups
        );
}

#undef ON_KIND
#undef IN_PLACE
#undef ON_FORM
#undef ON_TILE

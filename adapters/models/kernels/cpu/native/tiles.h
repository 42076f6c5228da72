// Products by tiles of rows and outputs, in the instructions that the including file names. It defines ON (a function's
// name here), FOR (attributes), V, LANES, ZERO, LOAD, STORE, SPREAD, FMA, HALF where there are weights in bfloat16, and
// TILES: rows and panels that go together.
//
// Every output is one chain: fma(x[k], w[k], ...) over ascending k, from zero; of weights in bfloat16 over ascending pairs,
// the second of each pair first, as processors with an instruction for such pairs do. A tile may stop and continue, since
// its sums are stored and loaded as they are. A chain does not depend on which rows and outputs are computed together.

// x: rows `stride` apart. w: of each panel `terms` rows of 32 weights, or half as many of 32 pairs; panels are `apart` bytes
// from each other. sums: rows `width` floats apart, 32 to a panel. unit: LANES outputs of a panel, and those 16 behind them;
// so many units from that one on go together.
#define PLACE(u) (unit * LANES + (u) / 2 * LANES + (u) % 2 * 16) // of an output in its panel

static inline __attribute__((always_inline)) FOR void ON(tile)(
    const int R, const int P, const int form, const float *x, long stride, const char *w, long apart, long terms,
    float *sums, long width, const int unit, const int units, int on
) {
    const int together = form == BRAINS ? 2 : 1; // terms
    const float *const of[4] = {x, x + 3 * stride, x + 6 * stride, x + 9 * stride}; // fewer pointers than rows
    V sum[12][4][32 / LANES];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int p = 0; p < P; p++)
#pragma GCC unroll 4
            for (int u = 0; u < 2 * units; u++)
                sum[r][p][u] = on ? LOAD(sums + r * width + p * 32 + PLACE(u)) : ZERO();
#ifdef HALF
    const int fetches = form == BRAINS && R >= FETCHING;
#else
    const int fetches = R >= FETCHING;
#endif
#pragma GCC unroll 4
    for (long k = 0; k < terms; k += together, w += 128) {
#pragma GCC unroll 16
        for (int p = 0; p < P && fetches; p++) {
            __builtin_prefetch(w + p * apart + FETCHED, 0, 2);
            __builtin_prefetch(w + p * apart + FETCHED + 64, 0, 2);
        }
#pragma GCC unroll 2
        for (int term = together - 1; term >= 0; term--) {
            if (LANES == 8) __asm__ volatile("" ::: "memory"); // pairs are loaded again: few registers are left for them
            V of_panel[4][32 / LANES];
#pragma GCC unroll 16
            for (int p = 0; p < P; p++)
#pragma GCC unroll 4
                for (int u = 0; u < 2 * units; u++) {
                    const char *const at = w + p * apart + 4 * PLACE(u);
#ifdef HALF
                    if (form == BRAINS) {
                        of_panel[p][u] = HALF(at, term);
                        continue;
                    }
#endif
                    of_panel[p][u] = LOAD((const float *)at);
                }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const V one = SPREAD(of[r / 3][r % 3 * stride + k + term]);
#pragma GCC unroll 16
                for (int p = 0; p < P; p++)
#pragma GCC unroll 4
                    for (int u = 0; u < 2 * units; u++) sum[r][p][u] = FMA(one, of_panel[p][u], sum[r][p][u]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int p = 0; p < P; p++)
#pragma GCC unroll 4
            for (int u = 0; u < 2 * units; u++) STORE(sums + r * width + p * 32 + PLACE(u), sum[r][p][u]);
}

#ifdef HALF
#define OF_UNITS(R, P, units)                                                                                          \
    if (form == BRAINS) ON(tile)(R, P, BRAINS, x, stride, w, apart, terms, sums, width, unit, units, on);              \
    else ON(tile)(R, P, FLOATS, x, stride, w, apart, terms, sums, width, unit, units, on);
#else
#define OF_UNITS(R, P, units) ON(tile)(R, P, FLOATS, x, stride, w, apart, terms, sums, width, unit, units, on);
#endif

#define ONE_UNIT(R, P) OF_UNITS(R, P, 1)
#define ALL_UNITS(R, P) OF_UNITS(R, P, 16 / LANES)
#define ON_TILE(R, P) OF_ROWS(R, P, 1, 1, ONE_UNIT)
#define ON_WHOLE(R, P) OF_ROWS(R, P, 16 / LANES, 1, ALL_UNITS) // so that few rows read a panel once

// As many of the rows as go together; returns how many.
static __attribute__((noinline)) FOR long ON(some)(
    long rows, int panels, int form, const float *x, long stride, const char *w, long apart, long terms, float *sums,
    long width, int on
) {
    TILES
    return 0;
}

static FOR void ON(multiply)(
    long rows, int panels, int form, const float *x, long stride, const char *w, long apart, long terms, float *sums,
    long width, int on
) {
    for (long done = 0; done < rows;) {
        const float *const from = x + done * stride;
        done += ON(some)(rows - done, panels, form, from, stride, w, apart, terms, sums + done * width, width, on);
    }
}

#undef PLACE
#undef OF_UNITS
#undef ONE_UNIT
#undef ALL_UNITS
#undef ON_TILE
#undef ON_WHOLE

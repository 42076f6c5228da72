// Products by tiles of rows and outputs, in the instructions that the including file names. It defines ON (a function's
// name here), FOR (attributes), V, LANES, ZERO, LOAD, STORE, SPREAD, FMA, HALF where there are weights in bfloat16, and
// TILES: rows and panels that go together.
//
// Every output is one chain: fma(x[k], w[k], ...) over ascending k, from zero; of weights in bfloat16 over ascending pairs,
// the second of each first, as processors with an instruction for such pairs have it. A tile may stop and go on, since its
// sums are stored and loaded as they are. Which rows and outputs go together is nothing that a chain could see.

// x: rows `stride` apart. w: of each panel `terms` rows of 32 weights, or half as many of 32 pairs; panels are `apart` bytes
// from each other. sums: rows `width` floats apart, 32 to a panel. unit: LANES outputs of a panel, and those 16 behind them.
static inline __attribute__((always_inline)) FOR void ON(tile)(
    const int R, const int P, const int form, const float *x, long stride, const char *w, long apart, long terms,
    float *sums, long width, const int unit, int on
) {
    const int together = form == BRAINS ? 2 : 1; // terms
    const float *const of[4] = {x, x + 3 * stride, x + 6 * stride, x + 9 * stride}; // fewer pointers than rows
    V sum[12][4][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) {
            const float *const at = sums + r * width + p * 32 + unit * LANES;
            sum[r][p][0] = on ? LOAD(at) : ZERO();
            sum[r][p][1] = on ? LOAD(at + 16) : ZERO();
        }
#pragma GCC unroll 4
    for (long k = 0; k < terms; k += together, w += 128) {
#pragma GCC unroll 2
        for (int term = together - 1; term >= 0; term--) {
            if (LANES == 8) __asm__ volatile("" ::: "memory"); // pairs are loaded again: few registers are left for them
            V low[4], high[4];
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) {
                const char *const at = w + p * apart + unit * LANES * 4;
#ifdef HALF
                if (form == BRAINS) {
                    low[p] = HALF(at, term);
                    high[p] = HALF(at + 64, term);
                    continue;
                }
#endif
                low[p] = LOAD((const float *)at);
                high[p] = LOAD((const float *)at + 16);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const V one = SPREAD(of[r / 3][r % 3 * stride + k + term]);
#pragma GCC unroll 16
                for (int p = 0; p < P; p++) {
                    sum[r][p][0] = FMA(one, low[p], sum[r][p][0]);
                    sum[r][p][1] = FMA(one, high[p], sum[r][p][1]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) {
            float *const at = sums + r * width + p * 32 + unit * LANES;
            STORE(at, sum[r][p][0]);
            STORE(at + 16, sum[r][p][1]);
        }
}

#ifdef HALF
#define ON_FORM(R, P)                                                                                                  \
    if (form == BRAINS) ON(tile)(R, P, BRAINS, x, stride, w, apart, terms, sums, width, unit, on);                     \
    else ON(tile)(R, P, FLOATS, x, stride, w, apart, terms, sums, width, unit, on);
#else
#define ON_FORM(R, P) ON(tile)(R, P, FLOATS, x, stride, w, apart, terms, sums, width, unit, on);
#endif

#define ON_TILE(R, P) OF_ROWS(R, P, 1, ON_FORM)

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

#undef ON_FORM
#undef ON_TILE

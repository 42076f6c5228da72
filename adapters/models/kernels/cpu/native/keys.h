// Attention over some keys, in the instructions that the including file names (see tiles.h): keys and values of a slot in
// the layout of products, the weights of scores, and how the result over some keys is joined to earlier results.

// A packed row becomes one of codes in 8 bits: what its codes stand for, and the same scale.
static FOR void ON(unpack)(const uint8_t *row, long size, int form, int8_t *to) {
    int count;
    const plane_t *const planes = planes_of(form, &count);
    const uint8_t *from = row;
    memcpy(to + size, row + row_bytes(size, form) - 4, 4);
    for (const plane_t *plane = planes; plane < planes + count; plane++) {
        // Numbers whose codes lack their lowest bit stand for the middle of both that they may be.
        const long each = plane_bytes(plane, size), first = plane->start * size / 2;
        const int mask = (1 << plane->bits) - 1, is_new = plane == planes || plane[-1].start != plane->start;
        const int least = 1 - (int)STEPS + (form == INT35S && plane->start == 1);
        for (int place = 0; place < 8 / plane->bits; place++) {
            int8_t *const codes = to + first + place * each;
            const int bits = place * plane->bits, up = plane->shift + 1;
            if (is_new)
                for (long i = 0; i < each; i++) codes[i] = (int8_t)(((from[i] >> bits & mask) << up) + least);
            else
                for (long i = 0; i < each; i++) codes[i] = (int8_t)(codes[i] + ((from[i] >> bits & mask) << up));
        }
        from += each;
    }
}

// What `turn` does, of codes: four of each of 32 keys are a word.
static inline __attribute__((always_inline)) FOR void ON(turn_codes)(
    const char *keys, long size, long count, float *panels, const int form
) {
    const long width = row_bytes(size, form);
    for (long first = 0; first < count; first += 32, panels += 32 * size) {
        const long there = count - first < 32 ? count - first : 32;
        const char *const from = keys + first * width;
        if (there == 32 && size % 4 == 0) {
            float scales[32], words[32];
            for (long lane = 0; lane < 32; lane++) scales[lane] = scale_of(from + lane * width, size);
            for (long i = 0; i < size; i += 4) {
                for (long lane = 0; lane < 32; lane += LANES) {
                    const V found = WORDS((const float *)(from + lane * width + i), (int)(width / 4));
                    STORE(words + lane, found);
                }
                for (int part = 0; part < 4; part++)
                    for (long lane = 0; lane < 32; lane++) {
                        const uint32_t word = bits_of(words[lane]) << (24 - 8 * part);
                        panels[(i + part) * 32 + lane] = decoded(word, form) * scales[lane];
                    }
            }
        } else {
            memset(panels, 0, (size_t)size * 32 * sizeof(float));
            for (long key = 0; key < there; key++) {
                const uint8_t *const codes = (const uint8_t *)from + key * width;
                const float scale = scale_of((const char *)codes, size);
                for (long i = 0; i < size; i++)
                    panels[i * 32 + key] = decoded((uint32_t)codes[i] << 24, form) * scale;
            }
        }
    }
}

static inline __attribute__((always_inline)) FOR void ON(turn_as)(
    const void *keys, long size, long count, float *panels, const int brain
) {
    const int words = brain ? 2 : 1; // numbers of 32 bits
    for (long first = 0; first < count; first += 32, panels += 32 * size) {
        const long there = count - first < 32 ? count - first : 32;
        if (there == 32 && size % words == 0) {
            for (long i = 0; i < size; i += words)
                for (long lane = 0; lane < 32; lane += LANES) {
                    const float *const at = (const float *)keys + ((first + lane) * size + i) / words;
                    const V found = WORDS(at, (int)(size / words));
                    float *const to = panels + i * 32 + lane;
                    if (brain) {
                        const V low = WORDS_LOW(found), high = WORDS_HIGH(found);
                        STORE(to, low);
                        STORE(to + 32, high);
                    } else {
                        STORE(to, found);
                    }
                }
        } else {
            memset(panels, 0, (size_t)size * 32 * sizeof(float));
            for (long key = 0; key < there; key++)
                for (long i = 0; i < size; i++) panels[i * 32 + key] = number(keys, (first + key) * size + i, brain);
        }
    }
}

// keys: `count` rows of `size` numbers -> panels of 32 keys: [panels, size, 32], zeros for keys that are not there.
static FOR void ON(turn)(const void *keys, long size, long count, float *panels, int form) {
    if (form == INT8S) ON(turn_codes)(keys, size, count, panels, INT8S);
    else if (form == FLOAT8S) ON(turn_codes)(keys, size, count, panels, FLOAT8S);
    else ON(turn_as)(keys, size, count, panels, form == BRAINS);
}

// What `align` does, of codes.
static inline __attribute__((always_inline)) FOR void ON(align_codes)(
    const char *values, long size, long count, float *panels, const int form
) {
    for (long start = 0; start < size; start += 32, panels += 32 * count) {
        const long there = size - start < 32 ? size - start : 32;
        if (there < 32) memset(panels, 0, (size_t)count * 32 * sizeof(float));
        for (long key = 0; key < count; key++) {
            const char *const row = values + key * row_bytes(size, form);
            const uint8_t *const codes = (const uint8_t *)row + start;
            const float scale = scale_of(row, size);
            if (there == 32)
                for (long i = 0; i < 32; i++) panels[key * 32 + i] = decoded((uint32_t)codes[i] << 24, form) * scale;
            else
                for (long i = 0; i < there; i++) panels[key * 32 + i] = decoded((uint32_t)codes[i] << 24, form) * scale;
        }
    }
}

static inline __attribute__((always_inline)) FOR void ON(align_as)(
    const void *values, long size, long count, float *panels, const int brain
) {
    for (long start = 0; start < size; start += 32, panels += 32 * count) {
        const long there = size - start < 32 ? size - start : 32;
        if (there < 32) memset(panels, 0, (size_t)count * 32 * sizeof(float));
        for (long key = 0; key < count; key++) {
            const long from = key * size + start;
            if (there == 32)
                for (long i = 0; i < 32; i++) panels[key * 32 + i] = number(values, from + i, brain);
            else
                for (long i = 0; i < there; i++) panels[key * 32 + i] = number(values, from + i, brain);
        }
    }
}

// values: `count` rows of `size` numbers -> panels of 32 of these: [panels, count, 32].
static FOR void ON(align)(const void *values, long size, long count, float *panels, int form) {
    if (form == INT8S) ON(align_codes)(values, size, count, panels, INT8S);
    else if (form == FLOAT8S) ON(align_codes)(values, size, count, panels, FLOAT8S);
    else if (form == BRAINS) ON(align_as)(values, size, count, panels, 1);
    else ON(align_as)(values, size, count, panels, 0);
}

// A row's scores become weights beside the greatest score of the keys [low, high), which are seen; all others weigh zero.
// There is room for 16 at a time. found: that score, and the sum of the weights.
static FOR void ON(weigh)(float *scores, long low, long high, long count, float *found) {
    const long all = (count + 15) / 16 * 16;
    float most[16], sums[16] = {0};
    for (long i = 0; i < low && i < all; i++) scores[i] = -INFINITY;
    for (long i = high < 0 ? 0 : high; i < all; i++) scores[i] = -INFINITY;
    for (int lane = 0; lane < 16; lane++) most[lane] = -INFINITY;
    for (long start = 0; start < all; start += 16)
#pragma GCC unroll 1
        for (int lane = 0; lane < 16; lane++)
            most[lane] = scores[start + lane] > most[lane] ? scores[start + lane] : most[lane];
#pragma GCC unroll 4
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            most[lane] = most[lane + half] > most[lane] ? most[lane + half] : most[lane];
    const float greatest = most[0];
    for (long i = 0; i < all; i++) scores[i] = weight_of(scores[i] - greatest);
    for (long start = 0; start < all; start += 16)
#pragma GCC unroll 1
        for (int lane = 0; lane < 16; lane++) sums[lane] += scores[start + lane];
    found[0] = greatest;
    found[1] = ON(summed)(sums);
}

// of, part: a row's greatest score, the sum of its weights, and what values they add up to. `of` becomes what both are.
// Zero is added to what a part found, since behind it keys of no weight may have been read, which make +0 of -0.
static FOR void ON(join)(float *of, const float *part, long size, int first) {
    const float most = first || part[0] > of[0] ? part[0] : of[0];
    // One of both is e^0, which is 1.
    const float apart = of[0] - part[0], less = weight_of(apart < 0.0f ? apart : -apart);
    const float before = first ? 0.0f : apart < 0.0f ? less : 1.0f, now = first || apart < 0.0f ? 1.0f : less;
    of[0] = most;
    of[1] = first ? part[1] : of[1] * before + part[1] * now;
    if (first)
        for (long i = 2; i < size + 2; i++) of[i] = part[i] + 0.0f;
    else
        for (long i = 2; i < size + 2; i++) of[i] = of[i] * before + (part[i] + 0.0f) * now;
}

static FOR void ON(finish)(const float *of, long size, void *out, long to, int brain) {
    for (long i = 0; i < size; i++) put(out, to + i, of[i + 2] / of[1], brain);
}

static const isa_t ON(isa) = {ON(multiply), ON(widen), ON(gate), ON(round), ON(norm), ON(prepare),
                               ON(hadamard), ON(unpack), ON(turn), ON(align), ON(weigh), ON(join), ON(finish),
                               ON(convolve), ON(gates),  ON(recur), ON(gated), LANES, ON(multiply_packed), ON(expand),
                               ON(fix), ON(multiply_fixed), ON(extremes), ON(allow), ON(weights), ON(likely)};

#undef ON
#undef FOR
#undef V
#undef LANES
#undef ZERO
#undef LOAD
#undef STORE
#undef SPREAD
#undef FMA
#undef HALF
#undef WORDS
#undef WORDS_LOW
#undef WORDS_HIGH
#undef TILES
#undef W
#undef MUL
#undef BYTES
#undef EIGHTHS
#undef HALF_FLOATS
#undef BRAIN_FLOATS
#undef WORDS_AT
#undef TABLE_OF
#undef NIBBLE
#undef NEXT
#undef PACKED_TILES
#undef FOR_FIXED
#undef DOT
#undef PAIR_AT
#undef EVENS
#undef ODDS
#undef NIBBLES
#undef PLACES
#undef PLACED
#undef SPREAD_WORD
#undef WHOLE
#undef ALL_OF
#undef TOPS
#undef ADDED
#undef DOWN
#undef FIXED_TILES

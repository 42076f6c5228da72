// The parts of drawing that look at every token of a vocabulary, in the instructions that the including file names (see
// tiles.h). Sums are of integers, and every operation on a number is rounded by itself.

// Returns 0 where some logit is no number. In 16 lanes: compilers make no vectors of one least and one largest number.
static FOR int ON(extremes)(const float *logits, long count, float *lowest, float *highest) {
    float low[16], high[16];
    int odd[16] = {0}, any = 0;
    for (int lane = 0; lane < 16; lane++) low[lane] = high[lane] = logits[0];
    const long whole = count / 16 * 16;
    for (long start = 0; start < whole; start += 16)
#pragma GCC unroll 1
        for (int lane = 0; lane < 16; lane++) {
            const float one = logits[start + lane];
            low[lane] = one < low[lane] ? one : low[lane];
            high[lane] = one > high[lane] ? one : high[lane];
            odd[lane] |= one != one;
        }
    for (long i = whole; i < count; i++) {
        low[0] = logits[i] < low[0] ? logits[i] : low[0];
        high[0] = logits[i] > high[0] ? logits[i] : high[0];
        odd[0] |= logits[i] != logits[i];
    }
    for (int lane = 0; lane < 16; lane++) {
        low[0] = low[lane] < low[0] ? low[lane] : low[0];
        high[0] = high[lane] > high[0] ? high[lane] : high[0];
        any |= odd[lane];
    }
    *lowest = low[0];
    *highest = high[0];
    return !any;
}

// Logits of tokens whose bit is set, and minus infinity for others. count: tokens, a multiple of 8.
static FOR void ON(allow)(const float *logits, const uint8_t *mask, long count, float *to) {
    for (long first = 0; first < count; first += 8) {
        const uint32_t bits = mask[first / 8];
#pragma GCC unroll 1
        for (int bit = 0; bit < 8; bit++) to[first + bit] = bits & 1u << bit ? logits[first + bit] : -INFINITY;
    }
}

// weights[i] = round(exp((logits[i] - peak) / temperature) * 2^42), by the operations of adapters/models/kernels/functions/exact_exp.py.
static FOR void ON(weights)(
    const float *logits, long count, double peak, double temperature, const double *factors, int64_t *weights
) {
    for (long i = 0; i < count; i++) {
        const double scaled = ((double)logits[i] - peak) / temperature, value = scaled < -128.0 ? -128.0 : scaled;
        const double shifted = value * 0x1.71547652b82fep+8 + ROUNDING, steps = shifted - ROUNDING;
        const int64_t whole = word_of(shifted) - word_of(ROUNDING);
        const double rest = value - steps * 0x1.62e42fefap-9 - steps * 0x1.cf79abc9e3b3ap-48;
        double series = rest * (1.0 / 120);
        series = (series + 1.0 / 24) * rest;
        series = (series + 1.0 / 6) * rest;
        series = (series + 0.5) * rest;
        series = (series + 1.0) * rest;
        const double factor = factors[whole & 255], power = double_of(((whole >> 8) + 42 + 1023) * ((int64_t)1 << 52));
        weights[i] = word_of((factor * series + factor) * power + ROUNDING) - word_of(ROUNDING);
    }
}

// Which of 64 tokens have so much noise that they could be drawn: one bit each. enough: fractions, by how far a token is
// below the likeliest one, in natural logarithms.
static FOR uint64_t ON(likely)(
    const float *logits, long first, double peak, double inverse, uint64_t key, const int64_t *enough
) {
    uint8_t hits[64];
    uint64_t found = 0;
    for (long i = 0; i < 64; i++) {
        const double depth = (peak - (double)logits[i]) * inverse;
        const int64_t fraction = (int64_t)(mixed(key + (uint64_t)(first + i + 1) * GOLDEN) >> 12);
        hits[i] = fraction >= enough[(int)(depth < DEEPEST ? depth : DEEPEST)];
    }
    for (int i = 0; i < 64; i++) found |= (uint64_t)hits[i] << i;
    return found;
}

// The parts of drawing that look at every token of a vocabulary, in the instructions that the including file names (see
// tiles.h). Sums are of integers, and every operation on a number is rounded by itself.

// Returns 0 where some logit is no number.
static FOR int ON(extremes)(const float *logits, long count, float *lowest, float *highest) {
    float low = logits[0], high = logits[0];
    int odd = 0;
    for (long i = 0; i < count; i++) {
        const float one = logits[i];
        low = one < low ? one : low;
        high = one > high ? one : high;
        odd |= one != one;
    }
    *lowest = low;
    *highest = high;
    return !odd;
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

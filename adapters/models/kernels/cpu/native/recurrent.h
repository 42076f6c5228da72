// The operations of recurrent layers, in the instructions that the including file names (see tiles.h): the convolution,
// the gates, the gated delta rule, and the gated norm behind it. Each row, and each column of a state, is a chain of its
// own, which depends neither on other chains nor on the pieces in which its rows come.

// Divided by its length, times `scale`.
static inline __attribute__((always_inline)) FOR void ON(unit)(float *of, long size, float scale) {
    float sums[16] = {0};
    for (long start = 0; start < size; start += 16) {
        const int lanes = size - start < 16 ? (int)(size - start) : 16;
        float some[16] = {0};
        for (int lane = 0; lane < lanes; lane++) some[lane] = of[start + lane];
        for (int lane = 0; lane < 16; lane++) sums[lane] = __builtin_fmaf(some[lane], some[lane], sums[lane]);
    }
    const float factor = 1.0f / __builtin_sqrtf(ON(summed)(sums) + 1e-6f) * scale;
    for (long i = 0; i < size; i++) of[i] *= factor;
}

static inline __attribute__((always_inline)) FOR void ON(convolve_as)(
    const convolve_t *job, long row, const int brain
) {
    const long channels = job->channels, size = job->key_size;
    const void *const first = input_of(job, row, 3), *const second = input_of(job, row, 2);
    const void *const third = input_of(job, row, 1), *const own = input_of(job, row, 0);
    const float *const taps = job->taps;
    float *restrict const to = job->out + row * channels;
    for (long i = 0; i < channels; i++) {
        float sum = number(first, i, brain) * taps[i];
        sum = __builtin_fmaf(number(second, i, brain), taps[channels + i], sum);
        sum = __builtin_fmaf(number(third, i, brain), taps[2 * channels + i], sum);
        sum = __builtin_fmaf(number(own, i, brain), taps[3 * channels + i], sum);
        to[i] = swish(sum);
    }
    for (long head = 0; head < 2 * job->key_heads; head++)
        ON(unit)(to + head * size, size, head < job->key_heads ? 1.0f / __builtin_sqrtf((float)size) : 1.0f);
}

static FOR void ON(convolve)(const convolve_t *job, long row) {
    if (job->positions[row] < 0) memset(job->out + row * job->channels, 0, (size_t)job->channels * sizeof(float));
    else if (job->brain) ON(convolve_as)(job, row, 1);
    else ON(convolve_as)(job, row, 0);
}

// beta, and what is left of a state from one row to the next, of each head.
static FOR void ON(gates)(const delta_t *job, long row) {
    const long heads = job->heads, from = row * job->stride;
    float *restrict const to = job->gates + row * 2 * heads;
    if (job->positions[row] < 0) {
        memset(job->out + row * heads * job->size, 0, (size_t)(heads * job->size) * sizeof(float));
        return;
    }
    for (long head = 0; head < heads; head++) {
        to[head] = sigmoid(number(job->projected, from + head, job->brain));
        const float rate = softplus(number(job->projected, from + heads + head, job->brain) + job->dt_bias[head]);
        to[heads + head] = weight_of(job->rate[head] * rate);
    }
}

static inline __attribute__((always_inline)) FOR V ON(columns)(const float *from, long count) {
    if (count >= LANES) return LOAD(from);
    float some[LANES] = {0};
    memcpy(some, from, (size_t)count * sizeof(float));
    return LOAD(some);
}

static inline __attribute__((always_inline)) FOR void ON(set_columns)(float *to, V from, long count) {
    if (count >= LANES) {
        STORE(to, from);
        return;
    }
    float some[LANES];
    STORE(some, from);
    memcpy(to, some, (size_t)count * sizeof(float));
}

static inline __attribute__((always_inline)) FOR V ON(added)(const V *sums) { // four chains, in pairs
    const V one = SPREAD(1.0f);
    const V left = FMA(sums[0], one, sums[1]), right = FMA(sums[2], one, sums[3]);
    return FMA(left, one, right);
}

// A state's columns as they fade into the next row, and what the row's key finds in them.
static inline __attribute__((always_inline)) FOR V ON(fade)(float *state, const float *key, float left, long size) {
    const V by = SPREAD(left), zero = ZERO();
    V sums[4] = {zero, zero, zero, zero};
    long at = 0;
    for (; at + 4 <= size; at += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const V one = FMA(LOAD(state + (at + i) * LANES), by, zero);
            STORE(state + (at + i) * LANES, one);
            sums[i] = FMA(SPREAD(key[at + i]), one, sums[i]);
        }
    for (int i = 0; at < size; at++, i++) {
        const V one = FMA(LOAD(state + at * LANES), by, zero);
        STORE(state + at * LANES, one);
        sums[i] = FMA(SPREAD(key[at]), one, sums[i]);
    }
    return ON(added)(sums);
}

// The row's correction put under its key, and what its query finds then.
static inline __attribute__((always_inline)) FOR V ON(correct)(
    float *state, const float *key, const float *query, V delta, long size
) {
    const V zero = ZERO();
    V sums[4] = {zero, zero, zero, zero};
    long at = 0;
    for (; at + 4 <= size; at += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const V one = FMA(SPREAD(key[at + i]), delta, LOAD(state + (at + i) * LANES));
            STORE(state + (at + i) * LANES, one);
            sums[i] = FMA(SPREAD(query[at + i]), one, sums[i]);
        }
    for (int i = 0; at < size; at++, i++) {
        const V one = FMA(SPREAD(key[at]), delta, LOAD(state + at * LANES));
        STORE(state + at * LANES, one);
        sums[i] = FMA(SPREAD(query[at]), one, sums[i]);
    }
    return ON(added)(sums);
}

// Both, of a row whose correction is known.
static inline __attribute__((always_inline)) FOR void ON(repeat)(
    float *state, const float *key, float left, V delta, long size
) {
    const V by = SPREAD(left), zero = ZERO();
#pragma GCC unroll 4
    for (long at = 0; at < size; at++) {
        const V one = FMA(SPREAD(key[at]), delta, FMA(LOAD(state + at * LANES), by, zero));
        STORE(state + at * LANES, one);
    }
}

// unit: a segment, a head of it, and some columns of its state.
static FOR void ON(recur)(const delta_t *job, long unit) {
    static _Thread_local __attribute__((aligned(64))) float state[WIDEST * LANES];
    const long blocks = (job->size + LANES - 1) / LANES, column = unit % blocks * LANES, left = job->size - column;
    const long count = left < LANES ? left : LANES, head = unit / blocks % job->heads;
    const long first = job->firsts[unit / blocks / job->heads], slot = job->slots[first], base = job->bases[first];
    const long start = job->positions[first], stop = start + job->counts[first], end = stop - stop % CHUNK;
    const long keys = job->key_heads * job->key_size, key = head / (job->heads / job->key_heads);
    const long size = job->key_size, kept = job->settles && end > start ? end : start;
    float *const memory = job->memory + (slot * job->heads + head) * size * job->size + column;
    const float *const key_ring = job->keys + (slot * job->key_heads + key) * RING * size;
    const float *const decay_ring = job->decays + (slot * job->heads + head) * RING;
    float *const delta_ring = job->deltas + (slot * job->heads + head) * RING * job->size + column;
    for (long at = 0; at < size; at++) {
        const V some = ON(columns)(memory + at * job->size, count);
        STORE(state + at * LANES, some);
    }
    for (long p = base; p < start; p++) {
        const long at = p % RING;
        ON(repeat)(state, key_ring + at * size, decay_ring[at], ON(columns)(delta_ring + at * job->size, count), size);
    }
    for (long p = start; p < stop; p++) {
        if (job->settles && p == end && end > base)
            for (long at = 0; at < size; at++) ON(set_columns)(memory + at * job->size, LOAD(state + at * LANES), count);
        const long row = first + p - start;
        const float *const query = job->rows + row * (2 * keys + job->heads * job->size) + key * size;
        const float *const gates = job->gates + row * 2 * job->heads + head;
        const V known = ON(fade)(state, query + keys, gates[job->heads], size);
        const V value = ON(columns)(job->rows + row * (2 * keys + job->heads * job->size) + 2 * keys + head * job->size + column, count);
        const V delta = FMA(FMA(known, SPREAD(-1.0f), value), SPREAD(gates[0]), ZERO());
        const V found = ON(correct)(state, query + keys, query, delta, size);
        ON(set_columns)(job->out + (row * job->heads + head) * job->size + column, found, count);
        if (p >= kept) ON(set_columns)(delta_ring + p % RING * job->size, delta, count);
    }
    if (job->settles && stop == end && end > base)
        for (long at = 0; at < size; at++) ON(set_columns)(memory + at * job->size, LOAD(state + at * LANES), count);
}

static inline __attribute__((always_inline)) FOR void ON(gated_norm_as)(
    const gated_t *job, long row, const int brain
) {
    const long size = job->size;
    for (long head = 0; head < job->heads; head++) {
        const long at = (row * job->heads + head) * size, gate = row * job->stride + head * size;
        const float *const x = (const float *)job->x + at;
        float sums[16] = {0};
        for (long start = 0; start < size; start += 16) {
            const int lanes = size - start < 16 ? (int)(size - start) : 16;
            float some[16] = {0};
            for (int lane = 0; lane < lanes; lane++) some[lane] = x[start + lane];
            for (int lane = 0; lane < 16; lane++) sums[lane] = __builtin_fmaf(some[lane], some[lane], sums[lane]);
        }
        const float scale = ON(scale)(ON(summed)(sums), size, job->eps);
        for (long i = 0; i < size; i++)
            put(job->out, at + i, x[i] * scale * job->weight[i] * swish(number(job->gate, gate + i, brain)), brain);
    }
}

static inline __attribute__((always_inline)) FOR void ON(gated_as)(const gated_t *job, long row, const int brain) {
    const long from = row * job->size, gate = row * job->stride;
    for (long i = 0; i < job->size; i++)
        put(job->out, from + i, number(job->x, from + i, brain) * sigmoid(number(job->gate, gate + i, brain)), brain);
}

// With a weight, a norm of each head times swish(gate); without, times sigmoid(gate).
static FOR void ON(gated)(const gated_t *job, long row) {
    if (job->weight && job->brain) ON(gated_norm_as)(job, row, 1);
    else if (job->weight) ON(gated_norm_as)(job, row, 0);
    else if (job->brain) ON(gated_as)(job, row, 1);
    else ON(gated_as)(job, row, 0);
}

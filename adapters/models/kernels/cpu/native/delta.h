// Recurrent layers: recurrent.h has the operations, delta_interface.py explains them. The state S of a head, [dk, dv],
// changes row by row: S *= left; d = beta (v - S^T k); S += k d^T; out = S^T q. A step starts from the state at the last
// multiple of 64 and repeats the rows behind it, which are in the rings, in the same operations.

static void convolve_end(const convolve_t *job, const int64_t *counts, long first, int settles, char *conv, char *inputs) {
    const long slot = job->slots[first], start = job->positions[first], base = job->bases[first];
    const long stop = start + counts[first], end = stop - stop % CHUNK, width = job->channels * (job->brain ? 2 : 4);
    const long kept = settles && end > start ? end : start;
    if (settles && end > base) // its inputs are rows of this step, or in the ring: a chunk lies between both ends
        for (long i = 0; i < 3; i++) {
            const long at = end - 3 + i;
            const char *const from = at >= start ? (const char *)job->mixed + (first + at - start) * job->stride * (job->brain ? 2 : 4)
                                                 : inputs + (slot * RING + at % RING) * width;
            memcpy(conv + (slot * 3 + i) * width, from, (size_t)width);
        }
    for (long p = kept; p < stop; p++) {
        const char *const from = (const char *)job->mixed + (first + p - start) * job->stride * (job->brain ? 2 : 4);
        memcpy(inputs + (slot * RING + p % RING) * width, from, (size_t)width);
    }
}

// mixed[rows, channels] -> out[rows, channels]: silu of the convolution with taps[4, channels]; heads of queries and keys are
// divided by their length, queries times key_size ** -0.5. firsts: the first row of each of `segments` segments. Inputs that
// later rows need are left in conv[slots, 3, channels] and inputs[slots, 128, channels].
void rekindle_convolve(
    const void *mixed, long stride, long rows, long channels, long key_heads, long key_size, const float *taps,
    const int64_t *slots, const int64_t *positions, const int64_t *bases, const int64_t *counts, const long *firsts,
    long segments, void *conv, void *inputs, float *out, int brain, int settles, int threads, int level
) {
    const convolve_t convolve = {mixed, stride, channels, key_heads, key_size, taps, slots,
                                 positions, bases, conv, inputs, out, brain};
    rows_t job = {isa_of(level), &convolve, rows, TOGETHER, CONVOLVE};
    share_rows(&job, threads);
    for (long i = 0; i < segments; i++) convolve_end(&convolve, counts, firsts[i], settles, conv, inputs);
}

static void recur_unit(void *of, long unit) {
    const delta_t *const job = of;
    job->isa->recur(job, unit);
}

static void recur_all(delta_t *job, long segments, int threads) {
    share(threads, segments * job->heads * ((job->size + job->isa->lanes - 1) / job->isa->lanes), recur_unit, job);
}

static void recur_end(const delta_t *job, long first) { // keys and decays; corrections are where they belong
    const long slot = job->slots[first], start = job->positions[first], stop = start + job->counts[first];
    const long end = stop - stop % CHUNK, size = job->key_size, keys = job->key_heads * size;
    for (long p = job->settles && end > start ? end : start; p < stop; p++) {
        const long row = first + p - start;
        const float *const from = job->rows + row * (2 * keys + job->heads * job->size) + keys;
        for (long head = 0; head < job->key_heads; head++)
            memcpy(job->keys + ((slot * job->key_heads + head) * RING + p % RING) * size, from + head * size, (size_t)size * sizeof(float));
        for (long head = 0; head < job->heads; head++)
            job->decays[(slot * job->heads + head) * RING + p % RING] = job->gates[(row * 2 + 1) * job->heads + head];
    }
}

// rows[rows, channels] as rekindle_convolve leaves them, projected[rows, 2, heads]: the gates b and a. -> out[rows, heads,
// size]. gates: room for [rows, 2, heads]. memory[slots, heads, key_size, size]; rings keys[slots, key_heads, 128, key_size],
// deltas[slots, heads, 128, size], decays[slots, heads, 128]. key_size: 1024 at most.
void rekindle_delta(
    const float *convolved, const void *projected, long stride, long rows, long key_heads, long heads, long key_size,
    long size, const float *rate, const float *dt_bias, const int64_t *slots, const int64_t *positions,
    const int64_t *bases, const int64_t *counts, const long *firsts, long segments, float *memory, float *keys,
    float *deltas, float *decays, float *gates, float *out, int brain, int settles, int threads, int level
) {
    delta_t delta = {isa_of(level), convolved, projected, stride, key_heads, heads, key_size, size, rate, dt_bias, slots, positions,
                     bases, counts, firsts, memory, keys, deltas, decays, gates, out, brain, settles};
    rows_t job = {delta.isa, &delta, rows, TOGETHER, GATES};
    share_rows(&job, threads);
    recur_all(&delta, segments, threads);
    for (long i = 0; i < segments; i++) recur_end(&delta, firsts[i]);
}

// The slot's state moves from `base` to base + 64 over the rows in the rings.
void rekindle_fold(
    long slot, long base, long key_heads, long heads, long key_size, long size, float *memory, float *keys, float *deltas,
    float *decays, int threads, int level
) {
    const int64_t slots = slot, bases = base, start = base + CHUNK, none = 0;
    const long first = 0;
    delta_t delta = {.isa = isa_of(level), .key_heads = key_heads, .heads = heads, .key_size = key_size, .size = size,
                     .slots = &slots, .positions = &start, .bases = &bases, .counts = &none, .firsts = &first,
                     .memory = memory, .keys = keys, .deltas = deltas, .decays = decays, .settles = 1};
    recur_all(&delta, 1, threads);
}

// x[rows, heads, size] -> out[rows, heads, size] in the gate's form: with weight[size] the RMSNorm of each head of float32
// times silu(gate), without times sigmoid(gate).
void rekindle_gated(
    const void *x, const void *gate, long stride, long rows, long heads, long size, const float *weight, void *out,
    int brain, float eps, int threads, int level
) {
    const gated_t gated = {x, gate, stride, heads, size, weight, out, brain, eps};
    rows_t job = {isa_of(level), &gated, rows, TOGETHER, GATED};
    share_rows(&job, threads);
}

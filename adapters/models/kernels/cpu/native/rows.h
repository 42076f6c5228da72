// Operations on a row between products, in the instructions that the including file names (see tiles.h): norms, and the
// preparation of projected heads. The compiler may vectorise these loops in any way: every operation in them is rounded by
// itself, and sums are sixteen chains, one for each place modulo 16, added up in pairs.

static FOR void ON(widen)(const uint16_t *x, float *to, long count) {
    for (long i = 0; i < count; i++) to[i] = widened(x[i]);
}

static FOR void ON(gate)(float *gate, const float *up, long count) {
    for (long i = 0; i < count; i++) gate[i] = swish(gate[i]) * up[i];
}

static FOR void ON(round)(const float *from, uint16_t *to, long count) {
    for (long i = 0; i < count; i++) to[i] = rounded(from[i]);
}

static inline __attribute__((always_inline)) FOR float ON(summed)(float *sums) {
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

static inline __attribute__((always_inline)) FOR float ON(scale)(float squares, long count, float eps) {
    return 1.0f / __builtin_sqrtf(squares / (float)count + eps);
}

static inline __attribute__((always_inline)) FOR void ON(norm_as)(
    const norm_t *norm, long row, const int brain, const int weight_brain
) {
    const long width = norm->width, from = row * width;
    float sums[16] = {0};
    for (long start = 0; start < width; start += 16) {
        const int lanes = width - start < 16 ? (int)(width - start) : 16;
        float some[16] = {0};
        for (int lane = 0; lane < lanes; lane++) some[lane] = number(norm->residual, from + start + lane, brain);
        if (norm->delta) {
            for (int lane = 0; lane < lanes; lane++) {
                some[lane] += number(norm->delta, from + start + lane, brain);
                if (brain) some[lane] = widened(rounded(some[lane]));
                put(norm->residual, from + start + lane, some[lane], brain);
            }
        }
        for (int lane = 0; lane < 16; lane++) sums[lane] = __builtin_fmaf(some[lane], some[lane], sums[lane]);
    }
    const float scale = ON(scale)(ON(summed)(sums), width, norm->eps);
    for (long i = 0; i < width; i++) {
        const float one = number(norm->residual, from + i, brain) * scale;
        put(norm->out, from + i, one * number(norm->weight, i, weight_brain), brain);
    }
}

static FOR void ON(norm)(const norm_t *norm, long row) {
    if (!norm->brain) ON(norm_as)(norm, row, 0, 0);
    else if (norm->weight_brain) ON(norm_as)(norm, row, 1, 1);
    else ON(norm_as)(norm, row, 1, 0);
}

// A head of keys or values becomes a row. There is room for 16 numbers at a time.
static inline __attribute__((always_inline)) FOR void ON(keep_as)(uint8_t *to, float *one, long size, const int form) {
    float most[16] = {0};
    for (long i = size; i % 16; i++) one[i] = 0.0f;
    for (long i = 0; i < size; i += 16)
        for (int lane = 0; lane < 16; lane++) {
            const float here = __builtin_fabsf(one[i + lane]);
            most[lane] = here > most[lane] ? here : most[lane];
        }
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            most[lane] = most[lane + half] > most[lane] ? most[lane + half] : most[lane];
    const float found = most[0] / (form == INT8S ? 127.0f : 448.0f), scale = found >= 0x1p-126f ? found : 0.0f;
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (long i = 0; i < size; i++) to[i] = encoded(one[i] * inverse, form);
    memcpy(to + size, &scale, sizeof scale);
}

static FOR void ON(keep)(void *cache, long to, float *one, long size, int form) {
    if (form == INT8S) ON(keep_as)((uint8_t *)cache + to, one, size, INT8S);
    else if (form == FLOAT8S) ON(keep_as)((uint8_t *)cache + to, one, size, FLOAT8S);
    else if (form == BRAINS)
        for (long i = 0; i < size; i++) put(cache, to + i, one[i], 1);
    else memcpy((float *)cache + to, one, (size_t)size * sizeof(float));
}

static inline __attribute__((always_inline)) FOR void ON(prepare_as)(
    const heads_t *heads, long row, const int brain
) {
    const long size = heads->head, turning = heads->queries + heads->kv, position = heads->positions[row];
    const long n = heads->turned, at = (position < 0 ? 0 : position) * n;
    const long all = turning + (heads->keys == heads->values ? 0 : heads->kv);
    for (long head = 0; head < all; head++) {
        const long from = row * heads->stride + head * size;
        float one[1024];
        for (long i = 0; i < size; i++) one[i] = number(heads->projected, from + i, brain);
        if (heads->bias)
            for (long i = 0; i < size; i++) one[i] += heads->bias[head * size + i];
        if (heads->normed & (head < turning ? NORMED_KEYS : NORMED_VALUES)) {
            float sums[16] = {0};
            for (long i = size; i % 16; i++) one[i] = 0.0f; // there is room
            for (long i = 0; i < size; i += 16)
                for (int lane = 0; lane < 16; lane++)
                    sums[lane] = __builtin_fmaf(one[i + lane], one[i + lane], sums[lane]);
            const float scale = ON(scale)(ON(summed)(sums), size, heads->eps);
            for (long i = 0; i < size; i++) one[i] *= scale;
        }
        if (head < turning) {
            for (long i = 0; i < size; i++) one[i] *= heads->weight[head * size + i];
            for (long i = 0; i < n; i++) {
                const float left = one[i], right = one[n + i], cos = heads->cos[at + i], sin = heads->sin[at + i];
                one[i] = left * cos - right * sin;
                one[n + i] = right * cos + left * sin;
            }
        }
        if (head < heads->queries) {
            memcpy(heads->out + (row * heads->queries + head) * size, one, (size_t)size * sizeof(float));
        } else if (position >= 0) {
            const long kept = head < turning ? head - heads->queries : head - turning;
            const long to = heads->slots[row] * heads->slot + kept * heads->group + position * row_width(size, heads->form);
            void *const cache = head < turning ? heads->keys : heads->values;
            ON(keep)(cache, to, one, size, heads->form);
        }
    }
}

static FOR void ON(prepare)(const heads_t *heads, long row) {
    if (heads->brain) ON(prepare_as)(heads, row, 1);
    else ON(prepare_as)(heads, row, 0);
}

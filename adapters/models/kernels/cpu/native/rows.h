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
#pragma GCC unroll 4
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

static inline __attribute__((always_inline)) FOR float ON(scale)(float squares, long count, float eps) {
    return 1.0f / __builtin_sqrtf(squares / (float)count + eps);
}

#define NORMED 256 // numbers of a row that are near at a time

// Some numbers of a row with what is added to them, in loops that compilers make vectors of.
static inline __attribute__((always_inline)) FOR void ON(sum_some)(
    char *restrict residual, const char *restrict delta, long count, const int brain, float *restrict some
) {
    for (long i = 0; i < count; i++) some[i] = number(residual, i, brain);
    if (!delta) return;
    for (long i = 0; i < count; i++) some[i] += number(delta, i, brain);
    if (brain) ON(round)(some, (uint16_t *)residual, count);
    else memcpy(residual, some, (size_t)count * sizeof(float));
    if (brain) ON(widen)((const uint16_t *)residual, some, count);
}

static inline __attribute__((always_inline)) FOR void ON(norm_as)(
    const norm_t *norm, long row, const int brain, const int weight_brain
) {
    const long width = norm->width, from = row * width, size = brain ? 2 : 4;
    char *const residual = (char *)norm->residual + from * size;
    const char *const delta = norm->delta ? (const char *)norm->delta + from * size : NULL;
    float sums[16] = {0}, some[NORMED];
    for (long start = 0; start < width; start += NORMED) {
        const long count = width - start < NORMED ? width - start : NORMED;
        ON(sum_some)(residual + start * size, delta ? delta + start * size : NULL, count, brain, some);
        for (long i = count; i % 16; i++) some[i] = 0.0f;
        for (long i = 0; i < count; i += 16)
#pragma GCC unroll 1
            for (int lane = 0; lane < 16; lane++) sums[lane] = __builtin_fmaf(some[i + lane], some[i + lane], sums[lane]);
    }
    const float scale = ON(scale)(ON(summed)(sums), width, norm->eps);
    char *const out = (char *)norm->out + from * size;
    for (long start = 0; start < width; start += NORMED) {
        const long count = width - start < NORMED ? width - start : NORMED;
        for (long i = 0; i < count; i++) some[i] = number(residual, start + i, brain) * scale;
        for (long i = 0; i < count; i++) some[i] *= number(norm->weight, start + i, weight_brain);
        if (brain) ON(round)(some, (uint16_t *)out + start, count);
        else memcpy(out + start * size, some, (size_t)count * sizeof(float));
    }
}

static FOR void ON(norm)(const norm_t *norm, long row) {
    if (!norm->brain) ON(norm_as)(norm, row, 0, 0);
    else if (norm->weight_brain) ON(norm_as)(norm, row, 1, 1);
    else ON(norm_as)(norm, row, 1, 0);
}

// The numbers of a head times an orthonormal Hadamard matrix, in blocks of the largest power of two that divides it.
static FOR void ON(hadamard)(float *one, long size) {
    const long block = size & -size;
    const float root = (float)(1.0 / __builtin_sqrt((double)block));
    for (long step = 1; step < block; step *= 2)
        for (long i = 0; i < size; i += 2 * step)
            for (long j = i; j < i + step; j++) {
                const float left = one[j], right = one[j + step];
                one[j] = left + right;
                one[j + step] = left - right;
            }
    for (long i = 0; i < size; i++) one[i] *= root;
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
    const float limit = form == INT8S ? 127.0f : form == FLOAT8S ? 448.0f : STEPS;
    const float found = most[0] / limit, scale = found >= 0x1p-126f ? found : 0.0f;
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    if (form <= FLOAT8S) {
        for (long i = 0; i < size; i++) to[i] = encoded(one[i] * inverse, form);
        memcpy(to + size, &scale, sizeof scale);
        return;
    }
    uint8_t codes[WIDEST];
    const long bytes = row_bytes(size, form);
    for (long i = 0; i < size; i++) {
        const float steps = one[i] * inverse, place = steps * 0.5f + STEPS / 2, low = place >= 0.0f ? place : 0.0f;
        codes[i] = (uint8_t)(int)(low < STEPS - 1 ? low : STEPS - 1);
    }
    int count;
    const plane_t *const planes = planes_of(form, &count);
    memset(to, 0, (size_t)bytes);
    memcpy(to + bytes - sizeof scale, &scale, sizeof scale);
    for (const plane_t *plane = planes; plane < planes + count; plane++) {
        const long each = plane_bytes(plane, size);
        for (int place = 0; place < 8 / plane->bits; place++) {
            const uint8_t *const from = codes + plane->start * size / 2 + place * each;
            for (long i = 0; i < each; i++)
                to[i] |= (uint8_t)((from[i] >> plane->shift & ((1 << plane->bits) - 1)) << place * plane->bits);
        }
        to += each;
    }
}

static FOR void ON(keep)(void *to, float *one, long size, int form) {
    if (is_packed(form)) {
        ON(hadamard)(one, size);
        ON(keep_as)(to, one, size, form);
    } else if (form == INT8S) ON(keep_as)(to, one, size, INT8S);
    else if (form == FLOAT8S) ON(keep_as)(to, one, size, FLOAT8S);
    else if (form == BRAINS)
        for (long i = 0; i < size; i++) put(to, i, one[i], 1);
    else memcpy(to, one, (size_t)size * sizeof(float));
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
            if (is_packed(heads->key_form)) ON(hadamard)(one, size);
            memcpy(heads->out + (row * heads->queries + head) * size, one, (size_t)size * sizeof(float));
        } else if (position >= 0) {
            const long kept = head < turning ? head - heads->queries : head - turning;
            const long to = heads->slots[row] * heads->slot + kept * heads->group + position * heads->apart;
            if (head < turning) ON(keep)((char *)heads->keys + to, one, size, heads->key_form);
            else ON(keep)((char *)heads->values + to, one, size, heads->value_form);
        }
    }
}

static FOR void ON(prepare)(const heads_t *heads, long row) {
    if (heads->brain) ON(prepare_as)(heads, row, 1);
    else ON(prepare_as)(heads, row, 0);
}

// Several decoder layers in one call: norms, products, heads and attention with the same numbers and in the same order as
// in separate calls, so with the same bits. What is saved are the ways back to the caller: a layer has a dozen operations,
// and calling one takes longer than many of them run.

typedef struct { // some outputs of a weight
    const void *panels, *up; // up: what they gate, or not there
    const packed_t *packed;  // how steps lie, if they are packed
    long outputs, terms;     // of packed ones: spans
    long piece;              // rows that are multiplied together
    int form;
} part_t;

typedef struct { // a weight: its parts, one below the other
    const part_t *parts;
    long count, terms, outputs;
} matrix_t;

typedef struct {
    const void *input_norm, *post_norm;
    matrix_t projection, out, gate_up, down;
    const float *bias, *heads; // bias: of all heads, or not there. heads: what queries and keys are multiplied with
    void *keys, *values;
    void *before; // where the rows are left as they come into the layer, or not there
    int normed, weight_brain;
    float eps, head_eps;
    long window; // of blocks: of the keys up to its own a row sees the last so many; 0: all
    int causal;  // and none behind it; else those of its block to the end
} layer_t;

typedef struct { // what the layers share
    long width, queries, kv, head;
    const float *cos, *sin;
    long turned;
    long slot, group, apart; // as rekindle_heads takes them
    int brain, key_form, value_form;
} decoder_t;

typedef struct { // what is found of rows on the way through a layer
    char *normed, *projected, *attended, *delta, *inner;
    float *queries;
    int64_t *seen;
} way_t;

static int way_of(way_t *way, const decoder_t *decoder, const layer_t *layers, long count, long rows) {
    static _Thread_local char *room;
    static _Thread_local long there;
    const long size = decoder->brain ? 2 : 4, attended = decoder->queries * decoder->head;
    long projected = 0, inner = 0, all = 0;
    for (long i = 0; i < count; i++) {
        if (layers[i].projection.outputs > projected) projected = layers[i].projection.outputs;
        if (layers[i].gate_up.outputs > inner) inner = layers[i].gate_up.outputs;
    }
    const long width = decoder->width * size;
    const long sizes[] = {width, projected * size, attended * size, width, inner * size, attended * 4, 16};
    char *to[7];
    for (int i = 0; i < 7; i++) all += (rows * sizes[i] + 63) / 64 * 64;
    if (there < all) {
        free(room);
        room = aligned_alloc(64, (size_t)all);
        there = room ? all : 0;
        if (!room) return -1;
    }
    char *at = room;
    for (int i = 0; i < 7; at += (rows * sizes[i++] + 63) / 64 * 64) to[i] = at;
    *way = (way_t){to[0], to[1], to[2], to[3], to[4], (float *)to[5], (int64_t *)to[6]};
    return 0;
}

static int multiply_matrix(
    const matrix_t *matrix, const void *x, void *out, long rows, int brain, int threads, int level
) {
    const long size = brain ? 2 : 4;
    char *to = out;
    for (const part_t *part = matrix->parts; part < matrix->parts + matrix->count; to += size * part++->outputs)
        for (long row = 0; row < rows; row += part->piece) {
            const long count = rows - row < part->piece ? rows - row : part->piece;
            const char *const from = (const char *)x + row * matrix->terms * size;
            char *const at = to + row * matrix->outputs * size;
            const int failed =
                part->packed
                    ? rekindle_packed_product(
                          from, brain, count, matrix->terms, part->panels, part->up, part->packed, part->outputs,
                          part->terms, at, matrix->outputs, brain, threads, level
                      )
                    : rekindle_product(
                          from, brain, count, matrix->terms, part->panels, part->up, part->form, part->outputs,
                          part->terms, at, matrix->outputs, brain, threads, level
                      );
            if (failed) return -1;
        }
    return 0;
}

// Padded rows, at position -1, stand behind the real ones. They are not computed, because nothing of them is kept.
static long real_of(const int64_t *positions, long rows) {
    while (rows > 0 && positions[rows - 1] < 0) rows--;
    return rows;
}

// Rows of the embedding, [vocabulary, width].
typedef struct {
    const void *table;
    const int64_t *tokens;
    long vocabulary;
    const void *instead; // of the row of token `mask`, or not there
    int64_t mask;
} embedding_t;

static int embed(const embedding_t *from, char *to, long rows, long bytes) {
    for (long row = 0; row < rows; row++) {
        const int64_t token = from->tokens[row];
        if (token < 0 || token >= from->vocabulary) return -2;
        const char *const own = (const char *)from->table + token * bytes;
        memcpy(to + row * bytes, from->instead && token == from->mask ? from->instead : own, (size_t)bytes);
    }
    return 0;
}

// Of rows of blocks, seen[0] to seen[1]: the keys [first, length) of their block, less those that the layer's mask hides.
static void see(
    const layer_t *layer, long rows, const int64_t *positions, const int64_t *lengths, const int64_t *firsts,
    int64_t *const seen[2]
) {
    for (long row = 0; row < rows; row++) {
        const int64_t nearest = positions[row] - layer->window + 1;
        seen[0][row] = layer->window && nearest > firsts[row] ? nearest : firsts[row];
        seen[1][row] = layer->causal ? positions[row] + 1 : lengths[row];
    }
}

typedef struct { // what layers leave of rows as they come to them, written where it is wanted in place of `before`
    const void *const *left; // parts: what `before` is of each; the rows themselves behind the last layer
    char *const *to;         // and where its first row goes
    long parts, rows;
    size_t stride; // bytes from one row to the next
} leaving_t;

static void leave_rows(const leaving_t *leaving, const void *left, const void *rows_in, size_t bytes) {
    for (long part = 0; part < leaving->parts; part++)
        for (long row = 0; leaving->left[part] == left && row < leaving->rows; row++)
            memcpy(leaving->to[part] + (size_t)row * leaving->stride, (const char *)rows_in + (size_t)row * bytes, bytes);
}

// As rekindle_layers. leaving: where what the layers leave of rows goes, if not where they say themselves.
static int run_layers(
    const decoder_t *decoder, const layer_t *layers, long count, long rows, const embedding_t *embedding, void *residual,
    const int64_t *slots, const int64_t *positions, const int64_t *lengths, const int64_t *firsts, int stops,
    const leaving_t *leaving, int threads, int level
) {
    const size_t bytes = (size_t)decoder->width * (decoder->brain ? 2 : 4);
    const long width = decoder->width, head = decoder->head, kv = decoder->kv;
    const int brain = decoder->brain;
    const void *delta = NULL; // of the layer before
    way_t way;
    rows = real_of(positions, rows);
    if (way_of(&way, decoder, layers, count, rows)) return -1;
    if (embedding && embed(embedding, residual, rows, width * (brain ? 2 : 4))) return -2;
    for (const layer_t *layer = layers; layer < layers + count; layer++) {
        rekindle_norm(
            residual, delta, layer->input_norm, way.normed, rows, width, brain, layer->weight_brain, layer->eps, threads,
            level
        );
        delta = way.delta;
        if (layer->before && leaving) leave_rows(leaving, layer->before, residual, bytes);
        else if (layer->before) memcpy(layer->before, residual, (size_t)rows * bytes);
        if (multiply_matrix(&layer->projection, way.normed, way.projected, rows, brain, threads, level)) return -1;
        rekindle_heads(
            way.projected, layer->projection.outputs, rows, decoder->queries, kv, head, layer->bias, layer->heads,
            decoder->cos, decoder->sin, decoder->turned, slots, positions, layer->keys, layer->values, decoder->slot,
            decoder->group, decoder->apart, way.queries, brain, decoder->key_form, decoder->value_form, layer->normed, layer->head_eps, threads, level
        );
        if (stops && layer == layers + count - 1) return 0;
        int64_t *const seen[2] = {way.seen, way.seen + rows};
        if (firsts) see(layer, rows, positions, lengths, firsts, seen);
        const int failed = rekindle_attend(
            way.queries, rows, kv, decoder->queries / kv, head, slots, firsts ? seen[0] : NULL, firsts ? seen[1] : lengths,
            layer->keys, layer->values, decoder->slot, decoder->group, decoder->apart, decoder->key_form,
            decoder->value_form, way.attended, brain, NULL,
            0.0f, threads, level
        );
        if (failed || multiply_matrix(&layer->out, way.attended, way.delta, rows, brain, threads, level)) return -1;
        rekindle_norm(
            residual, delta, layer->post_norm, way.normed, rows, width, brain, layer->weight_brain, layer->eps, threads,
            level
        );
        if (multiply_matrix(&layer->gate_up, way.normed, way.inner, rows, brain, threads, level)) return -1;
        if (multiply_matrix(&layer->down, way.inner, way.delta, rows, brain, threads, level)) return -1;
    }
    for (long i = 0; i < rows * width; i++) put(residual, i, number(residual, i, brain) + number(delta, i, brain), brain);
    if (leaving) leave_rows(leaving, residual, residual, bytes);
    return 0;
}

// residual[rows, width]: what goes through the layers, in place; or comes from the embedding first, if there is one.
// lengths: keys that each row sees; of blocks those from `firsts` on, as the layers' masks tell, or not there. stops: the last layer stops once its keys and values are kept, and the residual means
// nothing then. Returns 0; -1 where there is no memory, -2 for a token that the embedding does not have.
int rekindle_layers(
    const decoder_t *decoder, const layer_t *layers, long count, long rows, const embedding_t *embedding, void *residual,
    const int64_t *slots, const int64_t *positions, const int64_t *lengths, const int64_t *firsts, int stops,
    int threads, int level
) {
    return run_layers(
        decoder, layers, count, rows, embedding, residual, slots, positions, lengths, firsts, stops, NULL, threads, level
    );
}

// Keys and values of a draft's context rows. given[rows, terms]: what the target left of them, side by side, which the
// first layer's projection and norm make rows of that those behind it keep. Returns 0, or -1 where there is no memory.
int rekindle_context(
    const decoder_t *decoder, const layer_t *layers, long count, long rows, const void *given, const int64_t *slots,
    const int64_t *positions, int threads, int level
) {
    const int brain = decoder->brain;
    way_t way;
    rows = real_of(positions, rows);
    if (way_of(&way, decoder, layers, count, rows)) return -1;
    if (multiply_matrix(&layers->projection, given, way.delta, rows, brain, threads, level)) return -1;
    rekindle_norm(
        way.delta, NULL, layers->input_norm, way.normed, rows, decoder->width, brain, layers->weight_brain, layers->eps,
        threads, level
    );
    for (const layer_t *layer = layers + 1; layer < layers + count; layer++) {
        if (multiply_matrix(&layer->projection, way.normed, way.projected, rows, brain, threads, level)) return -1;
        rekindle_heads(
            way.projected, layer->projection.outputs, rows, 0, decoder->kv, decoder->head, layer->bias, layer->heads,
            decoder->cos, decoder->sin, decoder->turned, slots, positions, layer->keys, layer->values, decoder->slot,
            decoder->group, decoder->apart, way.queries, brain, decoder->key_form, decoder->value_form, layer->normed, layer->head_eps, threads, level
        );
    }
    return 0;
}

typedef struct {
    const isa_t *isa;
    const uint16_t *from;
    float *to;
    long width;
} wide_rows_t;

static void widen_row(void *of, long row) {
    const wide_rows_t *const job = of;
    job->isa->widen(job->from + row * job->width, job->to + row * job->width, job->width);
}

// logits[rows, outputs]: what a head makes of the RMSNorm of rows, rounded as rows are, in float32.
int rekindle_logits(
    const layer_t *head, void *rows_in, long rows, long width, int brain, float *logits, int threads, int level
) {
    const decoder_t decoder = {.width = width, .brain = brain};
    way_t way;
    if (way_of(&way, &decoder, head, 1, rows)) return -1;
    rekindle_norm(rows_in, NULL, head->input_norm, way.normed, rows, width, brain, head->weight_brain, head->eps, threads, level);
    if (multiply_matrix(&head->projection, way.normed, brain ? way.projected : (char *)logits, rows, brain, threads, level))
        return -1;
    wide_rows_t wide = {isa_of(level), (const uint16_t *)way.projected, logits, head->projection.outputs};
    if (brain) share(threads, rows, widen_row, &wide);
    return 0;
}

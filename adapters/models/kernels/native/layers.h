// Some layers of a decoder, one after the other, in one call: norms, products, heads and attention as calls of their own
// carry them out, with the same numbers and in the same order, so with the same bits. What is saved is the way back to
// the caller in between: a dozen operations a layer, each of which would take longer to be asked for than many take.

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
} layer_t;

typedef struct { // what the layers share
    long width, queries, kv, head;
    const float *cos, *sin;
    long turned;
    long slot, group; // as rekindle_heads takes them
    int brain, form;
} decoder_t;

typedef struct { // what is found of rows on the way through a layer
    char *normed, *projected, *attended, *inner;
    float *queries;
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
    const long sizes[] = {decoder->width * size, projected * size, attended * size, inner * size, attended * 4};
    char *to[5];
    for (int i = 0; i < 5; i++) all += (rows * sizes[i] + 63) / 64 * 64;
    if (there < all) {
        free(room);
        room = aligned_alloc(64, (size_t)all);
        there = room ? all : 0;
        if (!room) return -1;
    }
    char *at = room;
    for (int i = 0; i < 5; at += (rows * sizes[i++] + 63) / 64 * 64) to[i] = at;
    *way = (way_t){to[0], to[1], to[2], to[3], (float *)to[4]};
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

// residual[rows, width]: what goes through the layers, in place. delta, of the same shape: what is to be added to it
// before the first one (if `adds`), and after the last one. lengths: keys that each row sees. stops: the last layer stops
// once its keys and values are kept, and delta means nothing. Returns 0, or -1 where there is no memory.
int rekindle_layers(
    const decoder_t *decoder, const layer_t *layers, long count, long rows, void *residual, void *delta, int adds,
    const int64_t *slots, const int64_t *positions, const int64_t *lengths, int stops, int threads, int level
) {
    const long width = decoder->width, head = decoder->head, kv = decoder->kv;
    const int brain = decoder->brain;
    way_t way;
    if (way_of(&way, decoder, layers, count, rows)) return -1;
    for (const layer_t *layer = layers; layer < layers + count; layer++) {
        rekindle_norm(
            residual, adds || layer > layers ? delta : NULL, layer->input_norm, way.normed, rows, width, brain,
            layer->weight_brain, layer->eps, threads, level
        );
        if (layer->before) memcpy(layer->before, residual, (size_t)(rows * width * (brain ? 2 : 4)));
        if (multiply_matrix(&layer->projection, way.normed, way.projected, rows, brain, threads, level)) return -1;
        rekindle_heads(
            way.projected, layer->projection.outputs, rows, decoder->queries, kv, head, layer->bias, layer->heads,
            decoder->cos, decoder->sin, decoder->turned, slots, positions, layer->keys, layer->values, decoder->slot,
            decoder->group, way.queries, brain, decoder->form, layer->normed, layer->head_eps, threads, level
        );
        if (stops && layer == layers + count - 1) return 0;
        const int failed = rekindle_attend(
            way.queries, rows, kv, decoder->queries / kv, head, slots, NULL, lengths, layer->keys, layer->values,
            decoder->slot, decoder->group, decoder->form, way.attended, brain, threads, level
        );
        if (failed || multiply_matrix(&layer->out, way.attended, delta, rows, brain, threads, level)) return -1;
        rekindle_norm(
            residual, delta, layer->post_norm, way.normed, rows, width, brain, layer->weight_brain, layer->eps, threads,
            level
        );
        if (multiply_matrix(&layer->gate_up, way.normed, way.inner, rows, brain, threads, level)) return -1;
        if (multiply_matrix(&layer->down, way.inner, delta, rows, brain, threads, level)) return -1;
    }
    return 0;
}

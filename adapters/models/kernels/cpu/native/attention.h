// Attention of each row over its own interval of its slot's keys. The result over the keys of one tile is computed from
// zero, with the greatest score and the sum of weights there, by chains over ascending terms as in every product
// (tiles.h). Tiles stand at multiples of KEYS and are joined in ascending order. So a row's bits depend neither on the
// rows that are computed with it nor on the threads that compute tiles.
//
// At level 4 products with keys and values in bfloat16 are those of amx.h, of queries and weights that are split.
#define ASKING 96      // queries that go over a tile together: its keys and values are made ready once for all of them
#define SCORED (KEYS + 16) // room for a row's scores: rows never a power of two apart
#define JOINED 4        // rows whose tiles are joined by several threads
#define PARTS (1L << 22) // numbers that tiles which are shared out may leave behind

typedef struct {
    const isa_t *isa;
    const float *queries; // [rows, kv, group, size]
    const int64_t *slots, *lows, *highs;
    const char *keys, *values;
    long kv, group, size, slot, head, apart; // slot, head, apart: bytes between slots, heads and rows in the cache
    const float *sinks; // of each head of queries a score that joins the sum of its weights, or not there
    float cap;          // scores become cap * tanh(score / cap); 0: they stay
    void *out;
    int key_form, value_form, out_brain;
    int pairs; // are products those of amx.h
    const long *blocks; // first rows of those that go together, and how many they are
    long tiles, asking; // tiles that are shared out one by one, and the most queries that go over one; or no tiles
    long joins;         // parts of a block's rows, whose tiles are joined one by one
    float *parts;       // what is found in tiles that are shared out
    atomic_int failed;
} attention_t;

typedef struct {
    float *queries, *keys, *values, *scores, *products, *parts, *joined, *rows;
} bench_t; // of one thread

static long columns_of(long size) { return (size + 31) / 32 * 32; }
static long part_of(long size) { return columns_of(size) + 16; }

static int bench_of(bench_t *bench, long asking, long size) {
    static _Thread_local float *room;
    static _Thread_local long there;
    const long columns = columns_of(size);
    const long sizes[] = {asking * (size + 16), KEYS * size, KEYS * columns, asking * SCORED, asking * columns,
                          asking * part_of(size), asking * part_of(size), KEYS * (size + 1)};
    float **const to[] = {&bench->queries,  &bench->keys,  &bench->values, &bench->scores,
                          &bench->products, &bench->parts, &bench->joined, &bench->rows};
    long all = 0;
    for (int i = 0; i < 8; i++) all += (sizes[i] + 15) / 16 * 16;
    if (there < all) {
        free(room);
        room = aligned_alloc(64, (size_t)all * sizeof(float));
        there = room ? all : 0;
        if (!room) return -1;
    }
    float *at = room;
    for (int i = 0; i < 8; at += (sizes[i++] + 15) / 16 * 16) *to[i] = at;
    return 0;
}

// tanh from the exponential function of this library, which every processor rounds alike.
static void cap_scores(float *scores, long count, float cap) {
    for (long i = 0; i < count; i++) {
        const float size = __builtin_fabsf(scores[i] / cap), e = weight_of(-2.0f * size);
        scores[i] = __builtin_copysignf(cap * ((1.0f - e) / (1.0f + e)), scores[i]);
    }
}

// Some rows of a head as `turn` and `align` read them: one behind the other, and packed ones in 8 bits. form: what they
// have become.
static const char *dense_rows(
    const attention_t *job, const bench_t *bench, const char *from, long count, int *form
) {
    const long size = job->size, bytes = row_bytes(size, *form);
    char *to = (char *)bench->rows;
    if (is_packed(*form)) {
        for (long key = 0; key < count; key++, to += size + 4)
            job->isa->unpack((const uint8_t *)from + key * job->apart, size, *form, (int8_t *)to);
        *form = INT8S;
        return (const char *)bench->rows;
    }
    if (bytes == job->apart) return from;
    for (long key = 0; key < count; key++, to += bytes) memcpy(to, from + key * job->apart, (size_t)bytes);
    return (const char *)bench->rows;
}

// The scores of keys: every query times each of them.
static void score_keys(const attention_t *job, const bench_t *bench, long asking, const char *keys, long count, int form) {
    const long size = job->size, width = size + 16;
    const int panels = (int)((count + 31) / 32);
#if defined(__x86_64__)
    if (job->pairs) {
        turn_words((const uint32_t *)keys, size / 2, count, (uint32_t *)bench->keys);
        multiply_split(asking, panels, bench->queries, width, size / 2, bench->keys, size / 2, bench->scores, SCORED);
        return;
    }
#endif
    job->isa->turn(keys, size, count, bench->keys, form);
    job->isa->multiply(
        asking, panels, FLOATS, bench->queries, width, (const char *)bench->keys, size * 128, size, bench->scores, SCORED, 0
    );
}

// Every query's scores become weights of the keys from `start` on that its row sees.
static void weigh_keys(
    const attention_t *job, const bench_t *bench, long row, long asking, long start, long count, float *parts
) {
#if defined(__x86_64__)
    const unsigned before = job->pairs ? without_subnormals() : 0;
#endif
    for (long i = 0; i < asking; i++, parts += part_of(job->size)) {
        float *const scores = bench->scores + i * SCORED;
        const long low = job->lows ? job->lows[row + i / job->group] - start : -start;
        const long high = job->highs[row + i / job->group] - start;
        if (job->cap > 0.0f) cap_scores(scores, count, job->cap);
#if defined(__x86_64__)
        if (job->pairs) {
            weigh_split(scores, low, high, count, parts);
            continue;
        }
#endif
        job->isa->weigh(scores, low, high, count, parts);
    }
#if defined(__x86_64__)
    if (job->pairs) as_before(before);
#endif
}

// Every query's weights times the values.
static void weigh_values(
    const attention_t *job, const bench_t *bench, long asking, const char *values, long count, int form
) {
    const long size = job->size, columns = columns_of(size);
#if defined(__x86_64__)
    if (job->pairs) {
        const long all = (count + 31) / 32 * 32;
        pair_rows((const uint16_t *)values, size, count, all / 2, (uint32_t *)bench->values);
        multiply_split(
            asking, (int)(columns / 32), bench->scores, SCORED, KEYS / 2, bench->values, all / 2, bench->products, columns
        );
        return;
    }
#endif
    job->isa->align(values, size, count, bench->values, form);
    job->isa->multiply(
        asking, (int)(columns / 32), FLOATS, bench->scores, SCORED, (const char *)bench->values, count * 128, count,
        bench->products, columns, 0
    );
}

// The results of some rows' queries over one tile.
static void over_tile(
    const attention_t *job, const bench_t *bench, long row, long rows, long head, long tile, long stop, float *parts
) {
    const long size = job->size, group = job->group, start = tile * KEYS, columns = columns_of(size);
    const long count = stop - start < KEYS ? stop - start : KEYS, asking = rows * group;
    const long from = job->slots[row] * job->slot + head * job->head + start * job->apart;
    int key_form = job->key_form, value_form = job->value_form;
    const char *const keys = dense_rows(job, bench, job->keys + from, count, &key_form);
    score_keys(job, bench, asking, keys, count, key_form);
    weigh_keys(job, bench, row, asking, start, count, parts);
    const char *const values = dense_rows(job, bench, job->values + from, count, &value_form);
    weigh_values(job, bench, asking, values, count, value_form);
    for (long i = 0; i < asking; i++)
        memcpy(parts + i * part_of(size) + 2, bench->products + i * columns, (size_t)size * sizeof(float));
}

static void join_tile(const attention_t *job, long row, long rows, long tile, const float *parts, float *joined) {
    const long width = part_of(job->size);
    for (long i = 0; i < rows * job->group; i++) {
        const long low = job->lows ? job->lows[row + i / job->group] : 0, high = job->highs[row + i / job->group];
        if (low < high && low / KEYS <= tile && tile * KEYS < high)
            job->isa->join(joined + i * width, parts + i * width, job->size, tile == low / KEYS);
    }
}

// A sink is one more key, the last of all, whose value is zero.
static void join_sink(float *of, float sink, long size) {
    const float most = of[0] > sink ? of[0] : sink, before = weight_of(of[0] - most);
    of[0] = most;
    of[1] = of[1] * before + weight_of(sink - most);
    for (long i = 2; i < size + 2; i++) of[i] *= before;
}

static void put_out(const attention_t *job, long row, long rows, long head, float *joined) {
    const long size = job->size, group = job->group;
    for (long i = 0; i < rows * group; i++) {
        const long at = row + i / group, to = ((at * job->kv + head) * group + i % group) * size;
        const long low = job->lows ? job->lows[at] : 0;
        if (job->sinks && low < job->highs[at])
            join_sink(joined + i * part_of(size), job->sinks[head * group + i % group], size);
        if (low < job->highs[at] && is_packed(job->value_form)) job->isa->hadamard(joined + i * part_of(size) + 2, size);
        if (low < job->highs[at]) job->isa->finish(joined + i * part_of(size), size, job->out, to, job->out_brain);
        else memset((char *)job->out + to * (job->out_brain ? 2 : 4), 0, (size_t)size * (job->out_brain ? 2 : 4));
    }
}

static void seen_of(const attention_t *job, long row, long rows, long *first, long *stop) {
    *first = *stop = 0;
    for (long i = row; i < row + rows; i++) {
        const long low = job->lows ? job->lows[i] : 0, high = job->highs[i];
        if (low >= high) continue;
        if (!*stop || low / KEYS < *first) *first = low / KEYS;
        if (high > *stop) *stop = high;
    }
}

// unit: a block of rows and a head of keys; and one of the tiles, where these are shared out.
static void attend_unit(void *of, long unit) {
    attention_t *const job = of;
    const long pair = job->tiles ? unit / job->tiles : unit, head = pair % job->kv;
    const long row = job->blocks[2 * (pair / job->kv)], rows = job->blocks[2 * (pair / job->kv) + 1];
    const long size = job->size, asking = rows * job->group, only = job->tiles ? unit % job->tiles : -1;
    long first, stop;
    bench_t bench;
    seen_of(job, row, rows, &first, &stop);
    if (only >= 0 && (only < first || only * KEYS >= stop)) return;
    if (bench_of(&bench, asking, size)) {
        atomic_store(&job->failed, 1);
        return;
    }
    for (long i = 0; i < asking; i++) {
        const float *const from = job->queries + (((row + i / job->group) * job->kv + head) * job->group + i % job->group) * size;
        float *const to = bench.queries + i * (size + 16);
#if defined(__x86_64__)
        if (job->pairs) {
            split_floats(from, size, (uint16_t *)to, (uint16_t *)(to + size / 2));
            continue;
        }
#endif
        memcpy(to, from, (size_t)size * sizeof(float));
    }
    if (only >= 0) {
        float *const parts = job->parts + unit * job->asking * part_of(size);
        over_tile(job, &bench, row, rows, head, only, stop, parts);
        return;
    }
    for (long tile = first; tile * KEYS < stop; tile++) {
        over_tile(job, &bench, row, rows, head, tile, stop, bench.parts);
        join_tile(job, row, rows, tile, bench.parts, bench.joined);
    }
    put_out(job, row, rows, head, bench.joined);
}

// Joins the results of tiles that several threads computed, in the order of tiles. unit: a block and a head of keys, as in
// attend_unit, and a part of the block's rows.
static void join_shared(void *of, long unit) {
    attention_t *const job = of;
    const long pair = unit / job->joins, part = unit % job->joins, all = job->blocks[2 * (pair / job->kv) + 1];
    const long block = job->blocks[2 * (pair / job->kv)], row = block + all * part / job->joins;
    const long rows = block + all * (part + 1) / job->joins - row, width = part_of(job->size);
    const float *const found = job->parts + pair * job->tiles * job->asking * width + (row - block) * job->group * width;
    long first, stop;
    bench_t bench;
    seen_of(job, row, rows, &first, &stop);
    if (bench_of(&bench, rows * job->group, job->size)) {
        atomic_store(&job->failed, 1);
        return;
    }
    for (long tile = first; tile * KEYS < stop; tile++)
        join_tile(job, row, rows, tile, found + tile * job->asking * width, bench.joined);
    put_out(job, row, rows, pair % job->kv, bench.joined);
}

// queries[rows, kv, group, size] -> out[rows, kv, group, size]: each row attends to the keys [low, high) of its slot, at no
// keys (or low >= high) it gets zeros. slot, head, apart: bytes, of keys and values alike.
// sinks, cap: as in
// attention_t. Returns 0, or -1 where there is no memory.
int rekindle_attend(
    const float *queries, long rows, long kv, long group, long size, const int64_t *slots, const int64_t *lows,
    const int64_t *highs, const void *keys, const void *values, long slot, long head, long apart,
    int key_form, int value_form, void *out, int out_brain, const float *sinks, float cap, int threads, int level
) {
    static _Thread_local long *blocks;
    static _Thread_local float *parts;
    static _Thread_local long block_room, part_room;
    const long most = group < ASKING ? ASKING / group : 1;
    if (block_room < rows) {
        free(blocks);
        blocks = malloc((size_t)(2 * rows) * sizeof(long));
        block_room = blocks ? rows : 0;
        if (!blocks) return -1;
    }
    long count = 0, widest = 0, stop = 0;
    for (long row = 0; row < rows; row++) {
        const int goes_on = count && slots[row] == slots[row - 1] && blocks[2 * count - 1] < most;
        if (!goes_on) {
            blocks[2 * count] = row;
            blocks[2 * count++ + 1] = 0;
        }
        if (++blocks[2 * count - 1] > widest) widest = blocks[2 * count - 1];
        if (highs[row] > stop) stop = highs[row];
    }
    const long pairs = count * kv, tiles = (stop + KEYS - 1) / KEYS, asking = widest * group;
    attention_t job = {isa_of(level), queries, slots, lows, highs, keys, values, kv, group, size, slot,
                       head, apart, sinks, cap, out, key_form, value_form, out_brain, 0, blocks, 0, asking, 1, NULL, 0};
    job.pairs = level >= 4 && key_form == BRAINS && value_form == BRAINS && size % 2 == 0;
    const long left = pairs * tiles * asking * part_of(size);
    if (threads > 1 && tiles > 1 && pairs < 2L * threads && left <= PARTS) {
        if (part_room < left) {
            free(parts);
            parts = aligned_alloc(64, (size_t)(left + 15) / 16 * 16 * sizeof(float));
            part_room = parts ? left : 0;
            if (!parts) return -1;
        }
        job.tiles = tiles;
        job.parts = parts;
        share(threads, pairs * tiles, attend_unit, &job);
        if (widest >= JOINED) job.joins = threads < widest ? threads : widest;
        if (!atomic_load(&job.failed)) share(threads, pairs * job.joins, join_shared, &job);
    } else {
        share(threads, pairs, attend_unit, &job);
    }
    return atomic_load(&job.failed) ? -1 : 0;
}

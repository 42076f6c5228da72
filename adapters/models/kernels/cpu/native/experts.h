// Products of rows with the weights of the experts that they go through. The panels of all experts are divided among the
// threads together: those of one expert are too few to keep many threads busy. Bits are those of separate products.

typedef struct {
    const isa_t *isa;
    const packed_t *form; // of packed weights; NULL: the weights are not packed
    const void *x;
    long stride;            // numbers between rows of x
    const int64_t *sources; // of each place, the row of x that stands there; NULL: they are in order
    int brain, words;       // x is bfloat16; pairs of bfloat16 are moved as they are
    long terms, count;      // of a row; as the product takes them, with an odd last term's partner
    char *memory;           // rows as products read them, `apart` numbers from each other
    long apart;
    void *groups; // of packed weights: what each group of a row adds up to, or its fixed point
    long each;    // groups of a row
} bringing_t;

static void bring_row(void *of, long place) {
    const bringing_t *const job = of;
    const long from = (job->sources ? job->sources[place] : place) * job->stride;
    const void *const x = (const char *)job->x + from * (job->brain ? 2 : 4);
    if (job->form && job->form->kind >= FIXED_EIGHT) {
        job->isa->fix(
            job->form, x, job->terms, (int16_t *)job->memory + place * job->apart, (fixed_t *)job->groups + place * job->each
        );
        return;
    }
    float *const to = (float *)job->memory + place * job->apart;
    if (job->form) {
        widen_rows(
            job->isa, job->form, x, job->brain, 1, job->stride, to, job->apart, (float *)job->groups + place * job->each,
            job->each
        );
        return;
    }
    to[job->count - 1] = 0.0f; // beside an odd last term, or with it
    if (job->words) memcpy(to, x, (size_t)job->terms * 2);
    else if (job->brain) job->isa->widen(x, to, job->terms);
    else memcpy(to, x, (size_t)job->terms * sizeof(float));
}

typedef struct {
    product_t plain; // what all experts have in common; packed is used instead if its form is not NULL
    packed_job_t packed;
    const int64_t *experts, *firsts, *counts; // of each job: whose weights, its first place, its places (ROWS at most)
    const void *const *weights, *const *ups;  // by expert; ups: NULL where nothing is gated
    long groups, size;                        // groups of panels of a job; bytes of a number that comes out
} experts_t;

static void multiply_expert_group(void *of, long at) {
    const experts_t *const all = of;
    const long job = at / all->groups, group = at % all->groups, first = all->firsts[job], expert = all->experts[job];
    const char *const weight = all->weights[expert], *const up = all->ups ? all->ups[expert] : NULL;
    if (!all->packed.form) {
        product_t one = all->plain;
        one.rows = all->counts[job];
        one.x += first * one.stride;
        one.weights[0] = weight;
        one.weights[1] = up;
        one.out += first * one.apart * all->size;
        multiply_group(&one, group);
        return;
    }
    packed_job_t one = all->packed;
    one.rows = all->counts[job];
    one.x += first * one.stride;
    one.fixed += first * one.stride;
    one.added += first * one.groups;
    one.of += first * one.groups;
    one.weights[0] = weight;
    one.weights[1] = up;
    one.out += first * one.apart * all->size;
    multiply_packed_group(&one, group);
}

// One weight of every expert of a layer. weights, ups: addresses by expert; ups: what the weights gate; NULL: nothing.
// form: of packed weights; NULL: they are not packed. terms: of a row; for packed weights its spans.
typedef struct {
    const void *const *weights, *const *ups;
    const packed_t *form;
    int weight_form;
    long outputs, terms;
} table_t;

// Pairs of a row and one of its experts, sorted by expert, in runs of at most ROWS. places: of each pair its place. The
// others are as in experts_t and bringing_t.
typedef struct {
    long pairs, runs;
    int64_t *places, *sources, *experts, *firsts, *counts;
} pairs_t;

// Memory of at least so many bytes, which this thread keeps until it needs more. NULL: there is none.
static char *reserve(char **memory, long *there, long room) {
    if (*there < room) {
        free(*memory);
        *memory = aligned_alloc(64, (size_t)(room + 63) / 64 * 64);
        *there = *memory ? room : 0;
    }
    return *memory;
}

// out[pairs, outputs]: of each place its row of x times the weight of its expert, gated if there are ups. sources: NULL:
// rows of x are in the order of the places. Returns 0, or -1 where there is no memory.
static int multiply_chosen(
    const table_t *table, const pairs_t *pairs, const void *x, int x_brain, long stride, const int64_t *sources,
    void *out, int out_brain, int threads, int level
) {
    static _Thread_local char *memory;
    static _Thread_local long there;
    const packed_t *const form = table->form;
    const int fixes = form && form->kind >= FIXED_EIGHT;
    const isa_t *const isa = fixes ? fixed_isa_of(level) : isa_of(level);
    const long groups = form ? table->terms * form->per : 0, places = pairs->pairs, outputs = table->outputs;
    const long terms = form ? groups * form->group : table->terms;
    bringing_t bringing = {isa, form, x, stride, sources, x_brain, 0, terms, terms, NULL, 0, NULL, groups};
    int words;
    multiply_t *const multiply = multiply_of(level, table->weight_form, x_brain, &words);
    if (!form && table->weight_form == BRAINS) bringing.count = (terms + 1) / 2 * 2;
    if (!form && words != table->weight_form) bringing.words = 1, bringing.count /= 2;
    bringing.apart = (bringing.count + 15) / 16 * 16 + (fixes ? 32 : 16); // rows never a multiple of a page apart
    const long row_bytes = bringing.apart * (fixes ? 2 : 4), group_bytes = groups * (long)(fixes ? sizeof(fixed_t) : sizeof(float));
    bringing.memory = reserve(&memory, &there, places * (row_bytes + group_bytes));
    if (!bringing.memory) return -1;
    bringing.groups = bringing.memory + places * row_bytes;
    share(threads, places, bring_row, &bringing);
    const long panels = (outputs + 31) / 32;
    int together = PANELS;
    while (together > 1 && threads > 1 && pairs->runs * panels < 4L * threads * together) together /= 2;
    experts_t all = {
        {isa, multiply, (float *)memory, 0, bringing.apart, {NULL, NULL}, words, together, outputs, bringing.count, out,
         outputs, out_brain},
        {isa, form, (float *)memory, bringing.groups, (int16_t *)memory, bringing.groups, 0, bringing.apart, groups,
         {NULL, NULL}, together, outputs, table->terms, out, outputs, out_brain},
        pairs->experts, pairs->firsts, pairs->counts, table->weights, table->ups, (panels + together - 1) / together,
        out_brain ? 2 : 4
    };
    share(threads, pairs->runs * all.groups, multiply_expert_group, &all);
    return 0;
}

// Sort the pairs of rows with their experts, chosen[rows, each]. starts: room for a number of each expert.
static void sort_pairs(const int64_t *chosen, long rows, long each, long count, int64_t *starts, pairs_t *to) {
    to->pairs = rows * each;
    to->runs = 0;
    memset(starts, 0, (size_t)count * sizeof *starts);
    for (long pair = 0; pair < to->pairs; pair++) starts[chosen[pair]]++;
    for (long expert = 0, first = 0; expert < count; expert++) {
        const long stop = first + starts[expert];
        starts[expert] = first;
        for (; first < stop; first += to->counts[to->runs++]) {
            to->experts[to->runs] = expert;
            to->firsts[to->runs] = first;
            to->counts[to->runs] = stop - first < ROWS ? stop - first : ROWS;
        }
    }
    for (long pair = 0; pair < to->pairs; pair++) {
        to->places[pair] = starts[chosen[pair]]++;
        to->sources[to->places[pair]] = pair / each;
    }
}

#define ADDED 512 // columns at once, which stay near

typedef struct {
    const isa_t *isa;
    const char *made;
    int brain;
    const int64_t *places; // of each pair of a row and an expert
    const float *weights;  // of each pair
    long chosen, width;
    float *out;
} adding_t;

static void add_row(void *of, long row) {
    float part[ADDED];
    const adding_t *const job = of;
    for (long start = 0; start < job->width; start += ADDED) {
        const long count = job->width - start < ADDED ? job->width - start : ADDED;
        float *const sum = job->out + row * job->width + start;
        for (long pair = row * job->chosen; pair < (row + 1) * job->chosen; pair++) {
            const long at = job->places[pair] * job->width + start;
            const float weight = job->weights[pair];
            if (job->brain) job->isa->widen((const uint16_t *)job->made + at, part, count);
            else memcpy(part, (const float *)job->made + at, (size_t)count * sizeof(float));
            for (long i = 0; i < count; i++) part[i] *= weight;
            if (pair == row * job->chosen) memcpy(sum, part, (size_t)count * sizeof(float));
            else
                for (long i = 0; i < count; i++) sum[i] += part[i];
        }
    }
}

// out[rows, outputs of downs] = the sum of what the experts of each row make of it, times their weights, one after the
// other in float32. count: of experts. chosen, weights: [rows, each]. brain: what the two products leave is bfloat16, or
// float32. Returns 0, or -1 where there is no memory.
int rekindle_experts(
    const table_t *gates, const table_t *downs, long count, const void *x, int x_brain, long stride,
    const int64_t *chosen, const float *weights, long rows, long each, int brain, float *out, int threads, int level
) {
    static _Thread_local char *memory;
    static _Thread_local long there;
    const long places = rows * each, size = brain ? 2 : 4, numbers = (count + 5 * places) * (long)sizeof(int64_t);
    if (!reserve(&memory, &there, numbers + places * size * (gates->outputs + downs->outputs))) return -1;
    int64_t *const starts = (int64_t *)memory, *const lists = starts + count;
    char *const inner = memory + numbers, *const made = inner + places * size * gates->outputs;
    pairs_t pairs = {places, 0, lists, lists + places, lists + 2 * places, lists + 3 * places, lists + 4 * places};
    sort_pairs(chosen, rows, each, count, starts, &pairs);
    if (multiply_chosen(gates, &pairs, x, x_brain, stride, pairs.sources, inner, brain, threads, level)) return -1;
    if (multiply_chosen(downs, &pairs, inner, brain, gates->outputs, NULL, made, brain, threads, level)) return -1;
    adding_t job = {isa_of(level), made, brain, pairs.places, weights, each, downs->outputs, out};
    share(rows <= NARROW ? 1 : threads, rows, add_row, &job);
    return 0;
}

// An integer that compares as a number does, with minus zero equal to zero.
static inline int32_t order_of(float number) {
    const float one = number + 0.0f;
    int32_t bits;
    memcpy(&bits, &one, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

// The experts of each row, chosen[rows, each]: those of the greatest logits, the greatest first, and of equal logits the
// lower number. Their weights are their scores, divided by the sum of these if they are to add up to one.
void rekindle_choose(
    const float *logits, long stride, const float *scores, long apart, long rows, long count, long each, int normed,
    int64_t *chosen, float *weights
) {
    for (long row = 0; row < rows; row++, logits += stride, scores += apart, chosen += each, weights += each) {
        for (long expert = 0, found = 0; expert < count; expert++) {
            const int32_t own = order_of(logits[expert]);
            long at = found;
            while (at > 0 && own > order_of(logits[chosen[at - 1]])) at--;
            if (at == each) continue;
            if (found < each) found++;
            memmove(chosen + at + 1, chosen + at, (size_t)(found - 1 - at) * sizeof *chosen);
            chosen[at] = expert;
        }
        float sum = scores[chosen[0]];
        for (long i = 1; i < each; i++) sum += scores[chosen[i]];
        for (long i = 0; i < each; i++) weights[i] = normed ? scores[chosen[i]] / sum : scores[chosen[i]];
    }
}

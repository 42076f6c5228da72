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

// out[places, outputs]: of each place its row of x times the weight of its expert, gated if there are ups. Places of one
// job stand one behind the other. terms: of a row; for packed weights its spans. Returns 0, or -1 where there is no memory.
int rekindle_experts(
    const void *x, int x_brain, long stride, const int64_t *sources, long places, const int64_t *experts,
    const int64_t *firsts, const int64_t *counts, long jobs, const void *const *weights, const void *const *ups,
    const packed_t *form, int weight_form, long outputs, long terms, void *out, int out_brain, int threads, int level
) {
    static _Thread_local char *memory;
    static _Thread_local long there;
    const int fixes = form && form->kind >= FIXED_EIGHT;
    const isa_t *const isa = fixes ? fixed_isa_of(level) : isa_of(level);
    multiply_t *multiply = isa->multiply;
    const long groups = form ? terms * form->per : 0;
    bringing_t bringing = {isa, form, x, stride, sources, x_brain, 0, form ? groups * form->group : terms, 0, NULL, 0, NULL, groups};
    int words = weight_form;
    bringing.count = !form && weight_form == BRAINS ? (terms + 1) / 2 * 2 : bringing.terms;
#ifdef PAIRED
    if (!form && level >= 3 && weight_form == BRAINS && x_brain)
        multiply = multiply_pairs, words = FLOATS, bringing.words = 1, bringing.count /= 2;
#endif
    bringing.apart = (bringing.count + 15) / 16 * 16 + (fixes ? 32 : 16); // rows never a multiple of a page apart
    const long row_bytes = bringing.apart * (fixes ? 2 : 4), group_bytes = groups * (long)(fixes ? sizeof(fixed_t) : sizeof(float));
    const long room = places * (row_bytes + group_bytes);
    if (there < room) {
        free(memory);
        memory = aligned_alloc(64, (size_t)(room + 63) / 64 * 64);
        there = memory ? room : 0;
        if (!memory) return -1;
    }
    bringing.memory = memory;
    bringing.groups = memory + places * row_bytes;
    share(places <= NARROW ? 1 : threads, places, bring_row, &bringing);
    const long panels = (outputs + 31) / 32;
    int together = PANELS;
    while (together > 1 && threads > 1 && jobs * panels < 4L * threads * together) together /= 2;
    experts_t all = {
        {isa, multiply, (float *)memory, 0, bringing.apart, {NULL, NULL}, words, together, outputs, bringing.count, out,
         outputs, out_brain},
        {isa, form, (float *)memory, bringing.groups, (int16_t *)memory, bringing.groups, 0, bringing.apart, groups,
         {NULL, NULL}, together, outputs, terms, out, outputs, out_brain},
        experts, firsts, counts, weights, ups, (panels + together - 1) / together, out_brain ? 2 : 4
    };
    share(threads, jobs * all.groups, multiply_expert_group, &all);
    return 0;
}

#define ADDED 512 // columns at once, which stay near

typedef struct {
    const isa_t *isa;
    const char *made;
    int brain;
    const int64_t *places; // of each pair of a row and an expert; NULL: they are in order
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
            const long at = (job->places ? job->places[pair] : pair) * job->width + start;
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

// out[rows, width] = the sum of what each row's experts made, times their weights, one after the other in float32.
void rekindle_add_experts(
    const void *made, int brain, const int64_t *places, const float *weights, long rows, long chosen, long width,
    float *out, int threads, int level
) {
    adding_t job = {isa_of(level), made, brain, places, weights, chosen, width, out};
    share(rows <= NARROW ? 1 : threads, rows, add_row, &job);
}

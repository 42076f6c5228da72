// Products with packed weights, divided among threads as those of products.c are.

#define AT_ONCE 256 // terms of a panel that are expanded together; a span of 256 is one record
#define FIXED_TERMS 1024 // of a panel that are multiplied with all rows before the next: 32 KiB of steps
#define EXPANDED_FLOATS (32 * AT_ONCE * 2) // with scales and what is least of groups of 16 or more: an eighth again

typedef struct {
    const isa_t *isa;
    const packed_t *form;
    const float *x, *added;
    const int16_t *fixed; // instead of x
    const fixed_t *of;    // what its groups are
    long rows, stride, groups;
    const char *weights[2]; // the second one gates with the first, or is not there
    int together;
    long outputs, spans;
    char *out;
    long apart; // numbers between rows of what comes out
    int brain;
} packed_job_t;

// Many rows with one panel: its steps become floats once for all of them, some records after the other.
static void multiply_expanded(const packed_job_t *job, const char *w, float *sums, long width) {
    static _Thread_local float floats[EXPANDED_FLOATS];
    const packed_t *const form = job->form;
    const long terms = form->group * form->per, record = 32 * (form->group + (form->least ? 2 : 1));
    const packed_t expanded = {
        .kind = EXPANDED, .scale = FLOATS_32, .least = form->least ? ALONE : NONE, .group = form->group, .per = 1,
        .record = record * (long)sizeof(float)
    };
    const long step = terms < AT_ONCE ? AT_ONCE / terms : 1;
    for (long span = 0; span < job->spans; span += step) {
        const long spans = job->spans - span < step ? job->spans - span : step;
        job->isa->expand(form, w + span * form->record, spans, floats);
        job->isa->multiply_packed(
            job->rows, 1, &expanded, job->x + span * terms, job->stride, (const char *)floats, 0, spans * form->per, sums,
            width, span > 0, job->added + span * form->per, job->groups
        );
    }
}

// Rows in fixed point with some panels, some records after the other.
static void multiply_fixed(const packed_job_t *job, int panels, const char *w, long apart, float *sums, long width) {
    const packed_t *const form = job->form;
    const long terms = form->group * form->per;
    const long step = job->rows <= NARROW ? job->spans : terms < FIXED_TERMS ? FIXED_TERMS / terms : 1;
    for (long span = 0; span < job->spans; span += step)
        job->isa->multiply_fixed(
            job->rows, panels, form, job->fixed + span * terms, job->stride, w + span * form->record, apart,
            job->spans - span < step ? job->spans - span : step, sums, width, span > 0, job->of + span * form->per,
            job->groups
        );
}

static void multiply_packed_group(void *of, long group) {
    static _Thread_local float sums[2][ROWS * PANELS * 32];
    const packed_job_t *const job = of;
    const packed_t *const form = job->form;
    const long apart = job->spans * form->record, first = group * job->together;
    const long all = (job->outputs + 31) / 32, left = all - first, width = job->together * 32;
    const int panels = (int)(left < job->together ? left : job->together);
    if (form->kind >= FIXED_EIGHT)
        for (int i = 0; i < 2 && job->weights[i]; i++)
            multiply_fixed(job, panels, job->weights[i] + first * apart, apart, sums[i], width);
    else if (job->rows < NARROW) // fewer go through steps as they are
        for (int i = 0; i < 2 && job->weights[i]; i++)
            job->isa->multiply_packed(
                job->rows, panels, form, job->x, job->stride, job->weights[i] + first * apart, apart, job->spans, sums[i],
                width, 0, job->added, job->groups
            );
    else
        for (int i = 0; i < 2 && job->weights[i]; i++)
            for (int panel = 0; panel < panels; panel++)
                multiply_expanded(job, job->weights[i] + (first + panel) * apart, sums[i] + 32 * panel, width);
    const long start = first * 32, count = job->outputs - start < width ? job->outputs - start : width;
    char *const out = job->out + start * (job->brain ? 2 : 4);
    leave(job->isa, sums[0], job->weights[1] ? sums[1] : NULL, job->rows, width, count, out, job->apart, job->brain);
}

typedef struct {
    const isa_t *isa;
    const packed_t *form;
    const uint16_t *x;
    long from, terms, apart, groups; // from: numbers between rows of x; apart: of what they become
    int16_t *to;
    fixed_t *of;
} fixing_t;

static void fix_row(void *of, long row) {
    const fixing_t *const job = of;
    job->isa->fix(job->form, job->x + row * job->from, job->terms, job->to + row * job->apart, job->of + row * job->groups);
}

// Rows as floats, and what the terms of each group add up to where something is subtracted.
static void widen_rows(
    const isa_t *isa, const packed_t *form, const void *x, int brain, long rows, long stride, float *wide, long between,
    float *added, long groups
) {
    for (long i = 0; i < rows; i++) {
        const long from = i * stride;
        float *const to = wide + i * between, *const sums = added + i * groups;
        if (brain) isa->widen((const uint16_t *)x + from, to, groups * form->group);
        else memcpy(to, (const float *)x + from, (size_t)(groups * form->group) * sizeof(float));
        for (long group = 0; group < groups && form->least; group++) sums[group] = 0.0f;
        for (long k = 0; k < form->group && form->least; k++) // of all groups side by side: nothing waits for one sum
            for (long group = 0; group < groups; group++) sums[group] += to[group * form->group + k];
    }
}

// As rekindle_product, with weights packed as `form` says: panels of 32 outputs, [panels, spans, record]. Rows of `out`
// are `apart` numbers from each other; x is bfloat16 where steps are for rows in fixed point. Returns 0, or -1 where there
// is no memory.
int rekindle_packed_product(
    const void *x, int x_brain, long rows, long stride, const void *weight, const void *up, const packed_t *form,
    long outputs, long spans, void *out, long apart, int out_brain, int threads, int level
) {
    static _Thread_local char *memory;
    static _Thread_local long there;
    const int fixes = form->kind >= FIXED_EIGHT;
    const isa_t *const isa = fixes ? fixed_isa_of(level) : isa_of(level);
    const long groups = spans * form->per, terms = groups * form->group;
    const long between = (terms + 15) / 16 * 16 + (fixes ? 32 : 16); // rows never a multiple of a page apart
    const long row_bytes = between * (fixes ? 2 : 4), group_bytes = groups * (long)(fixes ? sizeof(fixed_t) : sizeof(float));
    const long once = rows < ROWS ? rows : ROWS, panels = (outputs + 31) / 32, room = once * (row_bytes + group_bytes);
    if (there < room) {
        free(memory);
        memory = aligned_alloc(64, (size_t)(room + 63) / 64 * 64);
        there = memory ? room : 0;
        if (!memory) return -1;
    }
    void *const of = memory + once * row_bytes;
    int together = PANELS;
    while (together > 1 && threads > 1 && panels < 4L * threads * together) together /= 2;
    for (long row = 0; row < rows; row += ROWS) {
        const long count = rows - row < ROWS ? rows - row : ROWS;
        const void *const from = (const char *)x + row * stride * (x_brain ? 2 : 4);
        fixing_t fixing = {isa, form, from, stride, terms, between, groups, (int16_t *)memory, of};
        if (fixes) share(count <= NARROW ? 1 : threads, count, fix_row, &fixing);
        else widen_rows(isa, form, from, x_brain, count, stride, (float *)memory, between, of, groups);
        packed_job_t job = {isa, form, (float *)memory, of, (int16_t *)memory, of, count, between, groups, {weight, up},
                            together, outputs, spans, NULL, apart, out_brain};
        job.out = (char *)out + row * apart * (out_brain ? 2 : 4);
        share(threads, (panels + together - 1) / together, multiply_packed_group, &job);
    }
    return 0;
}

typedef struct {
    const packed_t *form;
    const uint8_t *steps, *scale, *inner, *least, *own;
    long outputs, spans;
    uint8_t *panels;
} stepping_t;

// A number of each of 32 rows, side by side; zeros for rows that are not there. Returns where the next ones go.
static uint8_t *side_by_side(const uint8_t *from, long stride, long there, long size, uint8_t *to) {
    memset(to, 0, (size_t)(32 * size));
    for (long lane = 0; lane < there; lane++) memcpy(to + lane * size, from + lane * stride, (size_t)size);
    return to + 32 * size;
}

// The steps of one group of a row to the lane of its panel.
static void put_steps(int kind, const uint8_t *from, long group, uint8_t *to, long lane) {
    for (long k = 0; k < group; k += 8) {
        uint32_t words[2];
        memcpy(words, from + k, sizeof words);
        if (kind == FIXED_EIGHT) { // terms 0, 1, 4 and 5 are a word, then the others
            const uint32_t low = words[0] ^ 0x80808080, high = words[1] ^ 0x80808080;
            const uint32_t pairs[2] = {(low & 0xffff) | high << 16, low >> 16 | (high & 0xffff0000)};
            memcpy(to + 32 * k + 4 * lane, &pairs[0], 4);
            memcpy(to + 32 * k + 128 + 4 * lane, &pairs[1], 4);
        } else if (kind == EIGHT || kind == EIGHT_FLOATING) {
            for (long i = 0; i < 8; i++) to[32 * (k + i) + lane] = from[k + i];
        } else {
            uint32_t word = 0;
            for (long i = 0; i < 8; i++) word |= (uint32_t)from[k + i] << 4 * i;
            memcpy(to + 16 * k + 4 * lane, &word, sizeof word);
        }
    }
}

static void pack_steps_panel(void *of, long panel) {
    const stepping_t *const job = of;
    const packed_t *const form = job->form;
    const long first = panel * 32, there = job->outputs - first < 32 ? job->outputs - first : 32;
    const long groups = job->spans * form->per, width = form->scale == FLOATS_32 ? 4 : 2;
    const long size = form->kind == EIGHT || form->kind == EIGHT_FLOATING || form->kind == FIXED_EIGHT ? 32 : 16;
    uint8_t *to = job->panels + panel * job->spans * form->record;
    for (long span = 0; span < job->spans; span++) {
        const long at = (first * job->spans + span) * width;
        to = side_by_side(job->scale + at, job->spans * width, there, width, to);
        if (job->own) to = side_by_side(job->own + at, job->spans * width, there, width, to);
        for (long group = span * form->per; group < (span + 1) * form->per; group++) {
            if (job->inner) to = side_by_side(job->inner + first * groups + group, groups, there, 1, to);
            if (job->least) to = side_by_side(job->least + first * groups + group, groups, there, 1, to);
            memset(to, 0, (size_t)(size * form->group));
            for (long lane = 0; lane < there; lane++)
                put_steps(form->kind, job->steps + ((first + lane) * groups + group) * form->group, form->group, to, lane);
            to += size * form->group;
        }
    }
}

// A packed matrix as packed.py has it (a byte for each step) -> panels of 32 outputs, [panels, spans, record]: scales,
// then of each group its factors, what is least, and steps; those of four bits in words of eight terms.
void rekindle_pack_steps(
    const void *steps, const void *scale, const void *inner, const void *least, const void *own, const packed_t *form,
    long outputs, long spans, void *panels, int threads
) {
    stepping_t job = {form, steps, scale, inner, least, own, outputs, spans, panels};
    share(threads, (outputs + 31) / 32, pack_steps_panel, &job);
}

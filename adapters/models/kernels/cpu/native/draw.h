// Draws a token from each row of logits, with the same bits as kernels/cpu/host_draw.py. Noise is computed only for
// tokens that could be drawn. Which tokens may be drawn is found without sorting.

typedef struct {
    const float *used, *raw;       // logits: with bias and penalties; the model's own
    const uint8_t *mask;           // of tokens that may follow, a bit each
    long known;                    // bytes of it; of later tokens none may; -1: there is none, and all may
    double temperature;            // 0: the largest logit
    double mass, least;            // of top-p; how far below the likeliest one a token may be, as min-p has it
    int64_t key;                   // of the noise
    long limit;                    // of top-k
    long most;                     // alternatives; -1: no log-probabilities
    double *weighed;               // [2 + 2 most]; as sampling.py has it
    double lowest, highest;        // of the logits that are used
    long token;
} draw_t;

typedef struct { // a token that may be drawn
    uint32_t place; // larger for larger logits
    int32_t token;
    int64_t amount;
} chance_t;

typedef struct { // of a thread
    chance_t *chances, *fewer;
    int64_t *weights;
    float *masked, *logits;
} desk_t;

typedef struct { // the best token so far
    const draw_t *draw;
    const float *logits;
    double peak, best, bound; // bound: of the best, when `enough` was found
    int64_t enough[DEEPEST + 1];
    long token;
} search_t;

typedef struct {
    const isa_t *isa;
    draw_t *draws;
    long vocabulary;
    const double *factors;
    atomic_int failed;
} drawing_t;

static const desk_t *desk_of(long vocabulary) {
    static _Thread_local desk_t desk;
    static _Thread_local char *room;
    static _Thread_local long there;
    const long each = 2 * (long)sizeof(chance_t) + (long)sizeof(int64_t) + 2 * (long)sizeof(float);
    if (there < vocabulary) {
        const long padded = (vocabulary + 63) / 64 * 64;
        free(room);
        room = aligned_alloc(64, (size_t)(padded * each));
        there = room ? padded : 0;
        if (!room) return NULL;
        desk.chances = (chance_t *)room;
        desk.fewer = desk.chances + padded;
        desk.weights = (int64_t *)(desk.fewer + padded);
        desk.masked = (float *)(desk.weights + padded);
        desk.logits = desk.masked + padded;
    }
    return &desk;
}

static inline uint32_t place_of(float logit) { // -0 is where 0 is
    const uint32_t bits = bits_of(logit + 0.0f);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Of a positive number, by operations that have one right answer: see adapters/models/kernels/functions/exact_exp.py.
static double steady_log(double value) {
    const int64_t bits = word_of(value) - word_of(HALF_ROOT), power = bits >> 52;
    const double rest = double_of((bits & 0xfffffffffffff) + word_of(HALF_ROOT)) - 1.0, s = rest / (rest + 2.0), z = s * s;
    double series = z * (2.0 / 23);
    for (int odd = 21; odd > 1; odd -= 2) series = (series + 2.0 / odd) * z;
    return (double)power * 0x1.62e42fefap-1 + ((s * series + (double)power * 0x1.cf79abc9e3b3ap-40) + (s + s));
}

// The fractions whose noise makes up for so many natural logarithms, and hardly any others. The margin is far larger than
// the error of exp.
static void expect(search_t *search) {
    search->bound = search->best;
    for (int depth = 0; depth <= DEEPEST; depth++) {
        const double lacking = search->best + depth - 1e-5;
        search->enough[depth] = (int64_t)(exp(-exp(lacking < -6.0 ? 6.0 : -lacking)) * 0x1p52) - 64;
        if (lacking > 37.0) search->enough[depth] = INT64_MAX; // nothing has so much
    }
}

static void consider(search_t *search, long token) {
    const double scaled = ((double)search->logits[token] - search->peak) / search->draw->temperature;
    const int64_t fraction = (int64_t)(mixed((uint64_t)search->draw->key + (uint64_t)(token + 1) * GOLDEN) >> 12);
    if (scaled < search->draw->least || fraction < search->enough[(int)(-scaled < DEEPEST ? -scaled : DEEPEST)]) return;
    const double score = scaled - steady_log(-steady_log(((double)fraction + 0.5) * 0x1p-52));
    if (score < search->best || (score == search->best && token >= search->token)) return;
    search->best = score;
    search->token = token;
    if (score > search->bound + 0.125) expect(search);
}

// Of chances in order, larger logits first and lower tokens first among equals: the last one of those before which the
// amounts come to less than `goal`. All of them come to as much. fewer: room.
static chance_t last_of(const chance_t *chances, long count, double goal, chance_t *fewer) {
    static const int shifts[] = {21, 10, 0};
    int64_t before = 0;
    for (int part = 0; part < 3; part++) {
        int64_t sums[2048] = {0};
        const uint32_t most = part < 2 ? 2047 : 1023;
        for (long i = 0; i < count; i++) sums[chances[i].place >> shifts[part] & most] += chances[i].amount;
        uint32_t digit = most;
        for (; digit > 0 && (double)(before + sums[digit]) < goal; digit--) before += sums[digit];
        long kept = 0;
        for (long i = 0; i < count; i++)
            if ((chances[i].place >> shifts[part] & most) == digit) fewer[kept++] = chances[i];
        chances = fewer;
        count = kept;
    }
    long last = 0;
    for (long i = 0; i < count && (double)before < goal; before += chances[i++].amount) last = i;
    return chances[last];
}

// Keeps what is not behind `last`, in its order. Returns how many that are.
static long until(chance_t *chances, long count, chance_t last) {
    long kept = 0;
    for (long i = 0; i < count; i++) {
        const chance_t one = chances[i];
        if (one.place > last.place || (one.place == last.place && one.token <= last.token)) chances[kept++] = one;
    }
    return kept;
}

static long all_chances(const float *logits, long vocabulary, chance_t *chances) {
    for (long i = 0; i < vocabulary; i++) chances[i] = (chance_t){place_of(logits[i]), (int32_t)i, 1};
    return vocabulary;
}

// Those of a logit that is no less, and of any weight at all: how many that is, and what they weigh together. So none that
// comes before one of them, in order, is missing.
static long likeliest_of(
    const float *logits, long vocabulary, double bound, const int64_t *weights, chance_t *chances, int64_t *together
) {
    long count = 0;
    *together = 0;
    for (long first = 0; first < vocabulary; first += 16) {
        const long last = first + 16 < vocabulary ? first + 16 : vocabulary;
        int some = 0;
        for (long i = first; i < last; i++) some |= (double)logits[i] >= bound;
        for (long i = first; some && i < last; i++) {
            if ((double)logits[i] < bound || !weights[i]) continue;
            *together += weights[i];
            chances[count++] = (chance_t){place_of(logits[i]), (int32_t)i, weights[i]};
        }
    }
    return count;
}

// Top-k, and top-p of what it leaves: the tokens that stay, in ascending order, as `chances`.
static long truncated(const drawing_t *job, const draw_t *draw, const float *logits, double peak, const desk_t *desk) {
    const long vocabulary = job->vocabulary;
    chance_t *const chances = desk->chances;
    int64_t total = 0;
    long count = 0;
    if (draw->limit < vocabulary) {
        count = all_chances(logits, vocabulary, chances);
        count = until(chances, count, last_of(chances, count, (double)draw->limit, desk->fewer));
        if (draw->mass >= 1.0) return count;
        for (long i = 0; i < count; i++) desk->logits[i] = logits[chances[i].token];
        job->isa->weights(desk->logits, count, peak, draw->temperature, job->factors, desk->weights);
        for (long i = 0; i < count; i++) total += chances[i].amount = desk->weights[i];
    } else {
        job->isa->weights(logits, vocabulary, peak, draw->temperature, job->factors, desk->weights);
        for (long i = 0; i < vocabulary; i++) total += desk->weights[i];
        static const double depths[] = {6.0, 12.0, INFINITY}; // few tokens are most of it
        int64_t found = 0;
        for (int i = 0; i < 3 && (i == 0 || (double)found < (double)total * draw->mass); i++)
            count = likeliest_of(logits, vocabulary, peak - depths[i] * draw->temperature, desk->weights, chances, &found);
    }
    return until(chances, count, last_of(chances, count, (double)total * draw->mass, desk->fewer));
}

static void draw_from(const drawing_t *job, draw_t *draw, const float *logits, float peak, long likeliest, const desk_t *desk) {
    search_t search = {.draw = draw, .logits = logits, .peak = peak, .best = -INFINITY, .bound = -INFINITY, .token = job->vocabulary};
    const double inverse = 1.0 / (draw->temperature < 1e-290 ? 1e-290 : draw->temperature);
    consider(&search, likeliest);
    if (draw->limit < job->vocabulary || draw->mass < 1.0) {
        const long count = truncated(job, draw, logits, peak, desk);
        for (long i = 0; i < count; i++) consider(&search, desk->chances[i].token);
    } else
        for (long first = 0; first < job->vocabulary; first += 64) {
            float some[64];
            const long left = job->vocabulary - first;
            for (long i = 0; i < 64; i++) some[i] = i < left ? logits[first + i] : -INFINITY;
            uint64_t hits = job->isa->likely(some, first, peak, inverse, (uint64_t)draw->key, search.enough);
            if (left < 64) hits &= ((uint64_t)1 << left) - 1;
            for (; hits; hits &= hits - 1) consider(&search, first + __builtin_ctzll(hits));
        }
    draw->token = search.token < job->vocabulary ? search.token : job->vocabulary - 1;
}

static int in_order(const void *one, const void *other) {
    const chance_t *const a = one, *const b = other;
    return a->place != b->place ? (a->place < b->place) - (a->place > b->place) : (a->token > b->token) - (a->token < b->token);
}

static void weigh_tokens(const drawing_t *job, const draw_t *draw, const float *logits, const desk_t *desk) {
    const long vocabulary = job->vocabulary, most = draw->most;
    float lowest, peak;
    int64_t total = 0;
    job->isa->extremes(logits, vocabulary, &lowest, &peak);
    job->isa->weights(logits, vocabulary, peak, 1.0, job->factors, desk->weights);
    for (long i = 0; i < vocabulary; i++) total += desk->weights[i];
    draw->weighed[0] = (double)logits[draw->token] - (double)peak;
    draw->weighed[1 + 2 * most] = (double)total / 0x1p42;
    if (!most) return;
    long count = all_chances(logits, vocabulary, desk->chances);
    if (most < count) count = until(desk->chances, count, last_of(desk->chances, count, (double)most, desk->fewer));
    qsort(desk->chances, (size_t)count, sizeof(chance_t), in_order);
    for (long i = 0; i < most; i++) {
        draw->weighed[1 + i] = (double)desk->chances[i].token;
        draw->weighed[1 + most + i] = (double)logits[desk->chances[i].token] - (double)peak;
    }
}

static const float *masked(const drawing_t *job, const draw_t *draw, const float *logits, float *to) {
    const long vocabulary = job->vocabulary;
    if (draw->known < 0) return logits;
    const long whole = draw->known < vocabulary / 8 ? draw->known * 8 : vocabulary / 8 * 8;
    job->isa->allow(logits, draw->mask, whole, to);
    for (long i = whole; i < vocabulary; i++)
        to[i] = i / 8 < draw->known && draw->mask[i / 8] >> (i % 8) & 1 ? logits[i] : -INFINITY;
    return to;
}

static void draw_row(void *of, long row) {
    drawing_t *const job = of;
    draw_t *const draw = job->draws + row;
    const desk_t *const desk = desk_of(job->vocabulary);
    float lowest, peak;
    draw->token = 0;
    if (!desk) {
        atomic_store(&job->failed, 1);
        return;
    }
    if (!job->isa->extremes(draw->used, job->vocabulary, &lowest, &peak)) lowest = peak = NAN;
    draw->lowest = lowest;
    draw->highest = peak;
    if (!isfinite(lowest) || !isfinite(peak)) return; // nobody asks for more
    const float *const logits = masked(job, draw, draw->used, desk->masked);
    if (draw->known >= 0) job->isa->extremes(logits, job->vocabulary, &lowest, &peak);
    if (peak == -INFINITY) return; // none may follow
    while (draw->token < job->vocabulary - 1 && logits[draw->token] != peak) draw->token++;
    if (draw->temperature > 0.0) draw_from(job, draw, logits, peak, draw->token, desk);
    if (draw->most >= 0) weigh_tokens(job, draw, masked(job, draw, draw->raw, desk->masked), desk);
}

// A token of each row, for draws[rows]. factors: 2^(i / 256), i < 256. Returns -1 where there is no memory.
int rekindle_draw(draw_t *draws, long rows, long vocabulary, const double *factors, int threads, int level) {
    drawing_t job = {isa_of(level), draws, vocabulary, factors, 0};
    share(threads, rows, draw_row, &job);
    return atomic_load(&job.failed) ? -1 : 0;
}

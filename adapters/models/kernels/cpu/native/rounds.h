// A decode step of one slot in one call: the draft proposes, the target verifies, and the draft computes its context rows
// of what stays. The numbers and their order are those of separate calls, so the bits are the same. What is saved are the
// ways back to the caller, whose data has left the processor's caches after each call.

#define MOST_FED 64      // rows of a step
#define MOST_PARTS 64    // that a target leaves of a row
#define DRAWN_TOGETHER 4 // rows that are picked from at once: where the first is not agreed to, nobody asks for the others

typedef struct { // layers and the head behind them, for steps of so many rows
    const decoder_t *decoder;
    const layer_t *layers;
    long count, rows;
    const embedding_t *embedding;
    void *residual;
    int64_t *columns; // [4, rows]: tokens, slots, positions, lengths; [6, rows] of blocks: and starts, firsts
    const layer_t *head;
    float *logits;
    long vocabulary;
} pass_t;

typedef struct { // a draft's context, for steps of so many rows
    const decoder_t *decoder;
    const layer_t *layers;
    long count, rows;
    char *given;      // [rows, parts, width], side by side what the target has left
    int64_t *columns; // [4, rows]
} following_t;

typedef struct {
    const pass_t *target, *draft; // draft: not there, where nobody proposes
    const following_t *following; // by rows, ascending; enough for the target's
    const void *const *left;      // what the target leaves of rows for a draft: parts, each [rows, width]
    char *const *late;            // where that of a row goes that nobody proposed to, or not there: row late_row of each
    long parts, late_row;
    draw_t *guesses, *draws; // how proposals are picked, and how the target picks; each of the first row's kind
    const double *factors;   // as rekindle_draw takes them
    const int64_t *keys;     // of the noise: of the tokens at position + 1 and on
    const int64_t *stops;    // tokens that end the answer
    long stopping;
    int64_t mask; // the token of a block's rows that are to be proposed
    int64_t slot, position, first, token; // the last token, to be at `position`; the draft's context begins at `first`
    long count;                           // to be proposed at most
    const int64_t *given;                 // what is proposed where no draft is there
    long gifts;
    // what is found
    long proposed, accepted, kept; // kept: tokens, and rows that stay
    int followed;                  // has the draft rows of what stays?
    int64_t tokens[MOST_FED];
} round_t;

// Rows of one slot from `position` on, behind them padded ones. tokens: those after them are of `mask`.
static void fill(int64_t *columns, long rows, long count, const int64_t *tokens, long known, int64_t mask, int64_t slot, int64_t position) {
    for (long row = 0; row < rows; row++) {
        const int real = row < count;
        columns[row] = !real ? 0 : row < known ? tokens[row] : mask;
        columns[rows + row] = real ? slot : 0;
        columns[2 * rows + row] = real ? position + row : -1;
        columns[3 * rows + row] = real ? position + row + 1 : 0;
    }
}

static int pass_through(const pass_t *pass, int blocks, const leaving_t *leaving, int threads, int level) {
    int64_t *const columns = pass->columns;
    const long rows = pass->rows;
    const int failed = run_layers(
        pass->decoder, pass->layers, pass->count, rows, pass->embedding, pass->residual, columns + rows,
        columns + 2 * rows, columns + 3 * rows, blocks ? columns + 5 * rows : NULL, 0, leaving, threads, level
    );
    if (failed) return failed;
    return rekindle_logits(
        pass->head, pass->residual, real_of(columns + 2 * rows, rows), pass->decoder->width, pass->decoder->brain,
        pass->logits, threads, level
    );
}

// Of rows [first, first + count) of the logits. Whatever is drawn with is of the first of `draws`, but for the row.
static int draw_rows(
    const round_t *round, draw_t *draws, const pass_t *pass, long row, long first, long count, int threads, int level
) {
    for (long i = first; i < first + count; i++) {
        const float *const logits = pass->logits + (row + i) * pass->vocabulary;
        draws[i].used = draws[i].raw = logits;
        draws[i].key = draws[i].temperature > 0.0 ? round->keys[i] : 0;
    }
    return rekindle_draw(draws + first, count, pass->vocabulary, round->factors, threads, level);
}

static int ends(const round_t *round, int64_t token) {
    for (long i = 0; i < round->stopping; i++)
        if (round->stops[i] == token) return 1;
    return 0;
}

// fed: the last token, and behind it what is proposed, nothing after a token that ends the answer.
static int propose(round_t *round, int64_t *fed, int threads, int level) {
    const pass_t *const draft = round->draft;
    const long rows = draft->rows;
    fill(draft->columns, rows, rows, fed, 1, round->mask, round->slot, round->position);
    for (long row = 0; row < rows; row++) { // a block's rows see each other
        draft->columns[3 * rows + row] = round->position + rows;
        draft->columns[4 * rows + row] = round->position;
        draft->columns[5 * rows + row] = round->first;
    }
    int failed = pass_through(draft, 1, NULL, threads, level);
    if (!failed) failed = draw_rows(round, round->guesses, draft, 1, 0, round->count, threads, level);
    if (failed) return failed;
    while (round->proposed < round->count) {
        fed[1 + round->proposed] = round->guesses[round->proposed].token;
        if (ends(round, fed[++round->proposed])) break;
    }
    return 0;
}

static int agree_to(round_t *round, const int64_t *fed, int threads, int level) {
    const long fed_rows = 1 + round->proposed;
    for (long row = 0; row < fed_rows; row++) {
        draw_t *const draw = round->draws + row;
        if (row % DRAWN_TOGETHER == 0) {
            const long left = fed_rows - row, count = left < DRAWN_TOGETHER ? left : DRAWN_TOGETHER;
            const int failed = draw_rows(round, round->draws, round->target, 0, row, count, threads, level);
            if (failed) return failed;
        }
        if (!isfinite(draw->lowest) || !isfinite(draw->highest)) break;
        round->tokens[round->kept++] = draw->token;
        if (row == fed_rows - 1 || draw->token != fed[row + 1]) break;
        round->accepted++;
        if (ends(round, draw->token)) break;
    }
    return 0;
}

// The largest of them has what the target leaves, and so have those of fewer rows.
static const following_t *largest(const round_t *round) {
    const following_t *to = round->following;
    while (to->rows < round->target->rows) to++;
    return to;
}

static int follow(const round_t *round, int threads, int level) {
    const following_t *to = round->following;
    while (to->rows < round->kept) to++;
    fill(to->columns, to->rows, round->kept, NULL, 0, 0, round->slot, round->position);
    return rekindle_context(
        to->decoder, to->layers, to->count, to->rows, largest(round)->given, to->columns + to->rows,
        to->columns + 2 * to->rows, threads, level
    );
}

// The target's forward of so many rows; what it leaves for a draft is written where the draft reads it.
static int forward(const round_t *round, long rows, int threads, int level) {
    const size_t bytes = (size_t)round->target->decoder->width * (round->target->decoder->brain ? 2 : 4);
    char *to[MOST_PARTS];
    leaving_t leaving = {round->left, to, round->parts, rows, round->draft ? (size_t)round->parts * bytes : bytes};
    for (long part = 0; part < round->parts; part++)
        to[part] = round->draft ? largest(round)->given + (size_t)part * bytes
                   : round->late ? round->late[part] + (size_t)round->late_row * bytes : NULL;
    return pass_through(round->target, 0, round->draft || round->late ? &leaving : NULL, threads, level);
}

// Returns 0; -1 where there is no memory, -2 for a token that the embedding does not have. Nothing has happened then.
int rekindle_round(round_t *round, int threads, int level) {
    int64_t fed[MOST_FED] = {round->token};
    round->proposed = round->accepted = round->kept = 0;
    round->followed = 0;
    int failed = round->draft ? propose(round, fed, threads, level) : 0;
    if (failed) return failed;
    for (; !round->draft && round->proposed < round->gifts; round->proposed++)
        fed[1 + round->proposed] = round->given[round->proposed];
    fill(round->target->columns, round->target->rows, 1 + round->proposed, fed, MOST_FED, 0, round->slot, round->position);
    failed = forward(round, 1 + round->proposed, threads, level);
    if (!failed) failed = agree_to(round, fed, threads, level);
    if (!failed && round->draft && round->kept) round->followed = !follow(round, threads, level);
    return failed;
}

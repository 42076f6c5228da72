// Texts that proposals are copied from: where every three tokens stand, and what the end of a text has in common with an
// earlier place. Chains of places with equal hashes, as compressors of files keep them; nothing depends on a hash.

#define PREFIX_TOKENS 3  // that a match has at least
#define MOST_MATCHED 64  // tokens of a match that are counted
#define MOST_PLACES 16   // that are looked at, the newest first
#define MOST_COPIED 31   // tokens that follow a match

// A place is the number of a token that others stand before. Places from PREFIX_TOKENS to `indexed` are in the chains.
typedef struct {
    const int32_t *tokens;
    int32_t *earlier; // by place: the next older place of the same hash; 0: there is none
    int32_t *newest;  // by hash; 0: there is none
    int64_t count, indexed, bits; // tokens; places; of a hash
} text_t;

typedef struct {
    text_t *own, *archive; // archive: not there, or tokens of other texts with negative ones between them
    // what is found
    const text_t *source;   // the text to copy from
    int64_t place, matched; // the token that is copied first, and the tokens before it that agree; 0: nothing is found
    int64_t copies;         // tokens that follow
    int32_t copied[MOST_COPIED];
} match_t;

static uint32_t hash_prefix(const int32_t *tokens, int64_t bits) {
    uint64_t mixed = (uint32_t)tokens[0];
    mixed = mixed * 0x9e3779b97f4a7c15u + (uint32_t)tokens[1];
    mixed = mixed * 0x9e3779b97f4a7c15u + (uint32_t)tokens[2];
    mixed *= 0x9e3779b97f4a7c15u;
    return (uint32_t)(mixed >> (64 - bits));
}

static void index_text(text_t *text) {
    int64_t place = text->indexed < PREFIX_TOKENS ? PREFIX_TOKENS : text->indexed;
    for (; place < text->count; place++) {
        const uint32_t hash = hash_prefix(text->tokens + place - PREFIX_TOKENS, text->bits);
        text->earlier[place] = text->newest[hash];
        text->newest[hash] = (int32_t)place;
    }
    text->indexed = place;
}

// The longest match of the `known` tokens before `end`. Of places with equally long ones, that whose next token most of
// them have, and of these the newest. A match counts if it is longer than what was found before.
static void search_text(const text_t *text, const int32_t *end, int64_t known, match_t *match) {
    int32_t tokens[MOST_PLACES];
    int64_t places[MOST_PLACES], votes[MOST_PLACES], best = match->matched;
    long kinds = 0, tried = 0;
    if (known < PREFIX_TOKENS) return;
    int32_t place = text->newest[hash_prefix(end - PREFIX_TOKENS, text->bits)];
    for (; place && tried < MOST_PLACES; place = text->earlier[place], tried++) {
        const int32_t *const at = text->tokens + place;
        const int64_t most = known < place ? known : place;
        int64_t length = 0;
        while (length < most && length < MOST_MATCHED && at[-1 - length] == end[-1 - length]) length++;
        if (*at < 0 || length < PREFIX_TOKENS || length < best || (length == best && !kinds)) continue;
        if (length > best) kinds = 0;
        best = length;
        long kind = 0;
        while (kind < kinds && tokens[kind] != *at) kind++;
        if (kind == kinds) {
            tokens[kind] = *at;
            places[kind] = place;
            votes[kind] = 0;
            kinds++;
        }
        votes[kind]++;
        if (best == MOST_MATCHED) break;
    }
    long chosen = 0;
    for (long kind = 1; kind < kinds; kind++)
        if (votes[kind] > votes[chosen]) chosen = kind;
    if (!kinds) return;
    match->source = text;
    match->place = places[chosen];
    match->matched = best;
}

// The tokens that follow a match. A request's own text goes on with what is copied.
static void copy_text(match_t *match) {
    const text_t *const text = match->source;
    int32_t *const copied = match->copied;
    long count = 0;
    for (; count < MOST_COPIED; count++) {
        const int64_t place = match->place + count;
        if (place >= text->count && text != match->own) break;
        copied[count] = place < text->count ? text->tokens[place] : copied[place - text->count];
        if (copied[count] < 0) break;
    }
    match->copies = count;
}

void rekindle_match_texts(match_t *const *matches, long count) {
    for (long i = 0; i < count; i++) {
        match_t *const match = matches[i];
        text_t *const own = match->own;
        match->source = NULL;
        match->place = match->matched = match->copies = 0;
        index_text(own);
        search_text(own, own->tokens + own->count, own->count, match);
        if (match->archive && match->matched < MOST_MATCHED) {
            index_text(match->archive);
            search_text(match->archive, own->tokens + own->count, own->count, match);
        }
        if (match->source) copy_text(match);
    }
}

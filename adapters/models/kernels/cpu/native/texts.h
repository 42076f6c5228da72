// Texts that proposals are copied from: where every three tokens stand, and what the end of a text has in common with an
// earlier place. Chains of places with equal hashes, as compressors of files keep them; nothing depends on a hash.

#define PREFIX_TOKENS 3  // that a match has at least
#define MOST_MATCHED 64  // tokens of a match that are counted
#define MOST_PLACES 16   // that are looked at, the newest first
#define MOST_COPIED 31   // tokens that follow a match
#define MOST_BRANCH 7    // tokens of a branch of them

// A place is the number of a token that others stand before. Places from PREFIX_TOKENS to `indexed` are in the chains.
typedef struct {
    int32_t *tokens;
    int32_t *earlier; // by place: the next older place of the same hash; 0: there is none
    int32_t *newest;  // by hash; 0: there is none
    int64_t count, indexed, bits, room; // tokens; places; of a hash; tokens that there is memory for
} text_t;

// A place that was compared: `length` tokens before it agree with the end of the text.
typedef struct {
    const text_t *source;
    int64_t place, length;
} place_t;

typedef struct {
    text_t *own, *archive; // archive: not there, or tokens of other texts with negative ones between them
    // what was proposed of the last match, by the caller: tokens of the chain and of its branch
    int64_t chain_asked, branch_asked;
    // what is found
    const text_t *source;   // the text to copy from
    int64_t place, matched; // the token that is copied first, and the tokens before it that agree; 0: nothing is found
    int64_t copies;         // tokens that follow
    int32_t copied[MOST_COPIED];
    int64_t on_branch; // tokens that have come since the last search and stand on the branch of that match
    // the branch that `find_branch` found last: its tokens, and the tokens of the chain before them
    int64_t fork, branch_length;
    int32_t branch[MOST_BRANCH];
    int64_t end;       // tokens of the own text when it was searched
    int64_t compared;  // places, the own text's first
    place_t places[2 * MOST_PLACES];
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
        if (*at < 0 || length < PREFIX_TOKENS) continue;
        match->places[match->compared++] = (place_t){text, place, length};
        if (length < best || (length == best && !kinds)) continue;
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

// A way to go on that differs from a chain: its place, the tokens of the chain before it, and the places that agree.
typedef struct {
    const place_t *at;
    int64_t fork, votes;
} fork_t;

// The tokens that follow a place, as they were when the text was searched.
static int64_t count_following(const match_t *match, const place_t *at) {
    return (at->source == match->own ? match->end : at->source->count) - at->place;
}

// Finds the second-place continuation: how else the text could go on where the first `chain` copied tokens do. Of the
// compared places that follow the chain for a while and then differ, that counts which has the longest match, then that
// with whose next token most of them go on, then that which differs first.
static void find_branch(match_t *match, int64_t chain) {
    fork_t forks[2 * MOST_PLACES];
    long kinds = 0, chosen = 0;
    match->fork = match->branch_length = 0;
    for (int64_t i = 0; i < match->compared; i++) {
        const place_t *const at = match->places + i;
        const int32_t *const next = at->source->tokens + at->place;
        const int64_t following = count_following(match, at);
        int64_t fork = 0;
        while (fork < chain && fork < following && next[fork] == match->copied[fork]) fork++;
        if (fork == chain || fork >= following || next[fork] < 0) continue;
        long kind = 0;
        for (; kind < kinds; kind++) {
            const place_t *const known = forks[kind].at;
            if (forks[kind].fork == fork && known->source->tokens[known->place + fork] == next[fork]) break;
        }
        if (kind == kinds) forks[kinds++] = (fork_t){at, fork, 0};
        forks[kind].votes++;
        if (at->length > forks[kind].at->length) forks[kind].at = at;
    }
    if (!kinds) return;
    for (long kind = 1; kind < kinds; kind++) {
        const fork_t *const one = forks + kind, *const best = forks + chosen;
        const int64_t longer = one->at->length - best->at->length, more = one->votes - best->votes;
        if (longer > 0 || (longer == 0 && (more > 0 || (more == 0 && one->fork < best->fork)))) chosen = kind;
    }
    const fork_t *const best = forks + chosen;
    const int32_t *const next = best->at->source->tokens + best->at->place + best->fork;
    const int64_t most = count_following(match, best->at) - best->fork;
    int64_t count = 0;
    for (; count < most && count < MOST_BRANCH && next[count] >= 0; count++) match->branch[count] = next[count];
    match->fork = best->fork;
    match->branch_length = count;
}

void rekindle_find_branch(match_t *match, int64_t chain) {
    find_branch(match, chain < match->copies ? chain : match->copies);
}

// The tokens on the branch of the last match, of those that have come since. If no branch was proposed, that is 1 where
// the first token that differs from the chain is the one that the branch would have begun with.
static int64_t count_on_branch(match_t *match) {
    const text_t *const own = match->own;
    const int64_t came = own->count - match->end;
    const int64_t chain = match->chain_asked < match->copies ? match->chain_asked : match->copies;
    const int64_t most = match->branch_asked ? match->branch_asked : 1;
    if (!match->matched || came <= 0) return 0;
    const int32_t *const fresh = own->tokens + match->end;
    int64_t right = 0, count = 0;
    while (right < came && right < chain && fresh[right] == match->copied[right]) right++;
    if (right == came || right == chain) return 0;
    find_branch(match, chain);
    if (match->fork != right) return 0;
    while (count < most && count < match->branch_length && right + count < came &&
           fresh[right + count] == match->branch[count])
        count++;
    return count;
}

void rekindle_match_texts(match_t *const *matches, long count) {
    for (long i = 0; i < count; i++) {
        match_t *const match = matches[i];
        text_t *const own = match->own;
        match->on_branch = match->chain_asked ? count_on_branch(match) : 0;
        match->chain_asked = match->branch_asked = 0;
        match->source = NULL;
        match->place = match->matched = match->copies = match->compared = 0;
        match->end = own->count;
        index_text(own);
        search_text(own, own->tokens + own->count, own->count, match);
        if (match->archive && match->matched < MOST_MATCHED) {
            index_text(match->archive);
            search_text(match->archive, own->tokens + own->count, own->count, match);
        }
        if (match->source) copy_text(match);
    }
}

// Appends new tokens to the own text of each match, `counts[i]` of them to the i-th, and searches all texts. `matched` gets
// the length of each match. Returns -1, or the first text that has no room for its tokens; then nothing was done.
int64_t rekindle_match_appended(match_t *const *matches, const int32_t *appended, const int32_t *counts, int32_t *matched,
                                long count) {
    for (long i = 0; i < count; i++)
        if (matches[i]->own->count + counts[i] > matches[i]->own->room) return i;
    for (long i = 0; i < count; i++) {
        text_t *const own = matches[i]->own;
        if (counts[i]) memcpy(own->tokens + own->count, appended, counts[i] * sizeof *appended);
        own->count += counts[i];
        appended += counts[i];
    }
    rekindle_match_texts(matches, count);
    for (long i = 0; i < count; i++) matched[i] = (int32_t)matches[i]->matched;
    return -1;
}

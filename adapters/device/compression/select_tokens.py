"""Chooses which tokens of a scored prompt are kept: pure functions over token ids and scores.

A prompt is cut into pieces of about 32 tokens that end where lines or messages end. Some pieces are kept whatever their
scores are: the head, the tail, and pieces that repeat words of the tail. Tokens that say who speaks, and protected
messages, are kept exactly. Half of the budget, and what is left of the rest, goes to the pieces with the best mean
scores. Of pieces with equal scores the first one wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, product

from attrs import frozen

from effects.compression import PromptPart
from effects.ids import Span, Tokens

PIECE = 32  # tokens of a piece that cannot end with a line or a sentence
LEAST = 16  # tokens that a piece has at least, where it ends with a line or a sentence
MOST = 48  # and at most
HEAD = 8 * PIECE  # tokens
TAIL = 24 * PIECE
HEADER = 8  # the first tokens of a message, in which it says who speaks
BEST = 2  # one in this many pieces of the budget is for the best scores, whatever else is kept
GRAM = 4  # tokens of an n-gram that is looked for elsewhere
POOL = 96  # the last tokens of the prompt, of which all n-grams are looked for
# By the number of pieces below a limit: how many pieces around a repeated n-gram are kept, and how often it may occur.
ANCHORS = ((1024, 2, 8), (2048, 4, 16), (1 << 62, 8, 32))


@frozen(eq=False)
class TokenMarks:
    """Marks of the tokens of a vocabulary.

    lines, sentences: by id, 1 if the token ends one. controls: the ids of control tokens.
    """

    lines: bytes
    sentences: bytes
    controls: frozenset[int]

    def has_mark(self, token: int, kind: bytes) -> bool:
        """Does the token have this mark? kind: `lines` or `sentences`."""
        return token < len(kind) and kind[token] == 1


@frozen
class SelectedTokens:
    """The tokens that are kept, as ascending spans that do not touch. forced: spans that no score decided."""

    spans: tuple[Span, ...]
    forced: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens that are kept."""
        return sum(stop - start for start, stop in self.spans)


def select(
    prompt: Tokens, scores: Sequence[float], parts: Sequence[PromptPart], marks: TokenMarks, *, keep: int, most: int
) -> SelectedTokens | None:
    """Select about `keep` tokens, `most` at most. Return None if the tokens that must be kept are more than that."""
    held = merge_spans([*forced_spans(prompt, parts, marks), (len(prompt) - 1, len(prompt))])
    cuts = list(cut_into_pieces(prompt, parts, marks))
    taken = TokenBudget(held, min(keep, most))
    if taken.count > most:
        return None
    ranked = sorted(range(len(cuts)), key=lambda at: (-mean_score(scores, cuts[at]), at))
    taken.add(cuts[-1])
    for at in head_and_tail_pieces(cuts, taken.budget):
        taken.add(cuts[at])
    known = set(taken.spans)
    best = [cuts[at] for at in ranked if cuts[at] not in known][: taken.budget // (BEST * PIECE)]
    for piece in best:  # before the anchors: code ends as it goes on everywhere, so they would take all that is left
        taken.add(piece)
    for at in anchor_pieces(prompt, cuts, marks):
        taken.add(cuts[at])
    forced = merge_spans([span for span in taken.spans if span not in best])
    for at in ranked:
        taken.add(cuts[at])
    return SelectedTokens(merge_spans(taken.spans), forced)


class TokenBudget:
    """The spans that are kept so far. A span that would exceed the budget is not added."""

    def __init__(self, held: Sequence[Span], budget: int) -> None:
        self.spans = list(held)
        self.budget = budget
        self.count = sum(stop - start for start, stop in held)
        self._held = {token for start, stop in held for token in range(start, stop)}
        self._added = set[Span]()

    def add(self, piece: Span) -> None:
        """Keep the piece, if that is within the budget."""
        if piece in self._added:
            return
        size = sum(token not in self._held for token in range(*piece))
        if self.count + size > self.budget:
            return
        self._added.add(piece)
        self.spans.append(piece)
        self.count += size


def forced_spans(prompt: Tokens, parts: Sequence[PromptPart], marks: TokenMarks) -> Iterator[Span]:
    """Yield what must be kept: control tokens, the first line of each message's header, and protected messages."""
    for at, token in enumerate(prompt):
        if token in marks.controls:
            yield at, at + 1
    for part in parts:
        if part.protected:
            yield part.start, part.stop
            continue
        header = prompt[part.start : min(part.stop, part.start + HEADER)]
        line = next((at + 1 for at, token in enumerate(header) if marks.has_mark(token, marks.lines)), 0)
        if line:
            yield part.start, part.start + line


def cut_into_pieces(prompt: Tokens, parts: Sequence[PromptPart], marks: TokenMarks) -> Iterator[Span]:
    """Yield the pieces of the whole prompt in order. A piece never crosses the start of a message."""
    starts = sorted({part.start for part in parts if 0 < part.start < len(prompt)} | {len(prompt)})
    first = 0
    for stop in starts:
        while first < stop:
            last = find_piece_end(prompt, first, stop, marks)
            yield first, last
            first = last


def find_piece_end(prompt: Tokens, first: int, stop: int, marks: TokenMarks) -> int:
    """Return the end of the piece that begins at `first`: the end of a line, else a sentence, closest to 32 tokens."""
    if stop - first <= MOST:
        return stop
    choices = range(first + LEAST, first + MOST + 1)
    for kind in (marks.lines, marks.sentences):
        ends = [at for at in choices if marks.has_mark(prompt[at - 1], kind)]
        if ends:
            return min(ends, key=lambda at: (abs(at - first - PIECE), at))
    return first + PIECE


def head_and_tail_pieces(cuts: Sequence[Span], budget: int) -> Iterator[int]:
    """Yield the pieces of the tail and of the head, three to one. They get at most a third of a small budget."""
    share = min(1.0, budget / 3 / (HEAD + TAIL))
    for order, tokens in ((range(len(cuts) - 1, -1, -1), TAIL * share), (range(len(cuts)), HEAD * share)):
        sizes = accumulate(cuts[at][1] - cuts[at][0] for at in order)
        yield from (at for at, size in zip(order, sizes, strict=True) if size <= tokens)


def anchor_pieces(prompt: Tokens, cuts: Sequence[Span], marks: TokenMarks) -> Iterator[int]:
    """Yield the pieces that contain an n-gram of the prompt's end, those with the rarest n-grams first.

    The pieces around them come behind all of these. Otherwise, in a small budget, the neighbours of a chance match
    would leave no room for other matches.
    """
    radius, limit = next((radius, limit) for pieces_, radius, limit in ANCHORS if len(cuts) < pieces_)
    body = max(0, len(prompt) - POOL)
    grams = {prompt[at : at + GRAM] for at in range(body, len(prompt) - GRAM + 1)}
    grams = {gram for gram in grams if not marks.controls.intersection(gram)}
    pieces_of: dict[Tokens, list[int]] = {}
    piece = 0
    for at in range(body - GRAM + 1):
        while cuts[piece][1] <= at:
            piece += 1
        gram = prompt[at : at + GRAM]
        if gram in grams:
            pieces_of.setdefault(gram, []).append(piece)
    rare = sorted((found for found in pieces_of.values() if len(found) <= limit), key=lambda one: (len(one), one))
    middles = list(dict.fromkeys(chain.from_iterable(rare)))
    yield from middles
    for away, middle in product(range(1, radius + 1), middles):
        yield from (at for at in (middle - away, middle + away) if 0 <= at < len(cuts))


def mean_score(scores: Sequence[float], span: Span) -> float:
    """Return the mean score of the tokens of a span."""
    start, stop = span
    return sum(scores[start:stop]) / (stop - start)


def merge_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the union of the spans, ascending, none touching the next."""
    found = list[Span]()
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)

"""Which tokens of a scored prompt are kept: pure functions over ids and scores.

A prompt is cut into pieces of about 32 tokens that end where lines or messages do. Some are kept whatever their scores:
the head, the tail, and whatever repeats words of the tail. What says who speaks, and what is protected, is kept to the
token. Half of the budget, and what is left of it, goes to the pieces with the best mean scores; of equal ones, to
the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, product

from attrs import frozen

from effects.compression import PromptPart
from effects.ids import Span, Tokens

PIECE = 32  # tokens, where a line goes on
LEAST, MOST = 16, 48  # that a piece has where it can end with a line, or a sentence
HEAD, TAIL = 8 * PIECE, 24 * PIECE
HEADER = 8  # tokens in which a message says whose it is
BEST = 2  # one in so many pieces of the budget is for the best scores, whatever else is kept
GRAM, POOL = 4, 96  # repeated n-grams are looked for, of the last so many tokens
# Pieces around each place where one is repeated, and how often it may be, by the number of pieces.
ANCHORS = ((1024, 2, 8), (2048, 4, 16), (1 << 62, 8, 32))


@frozen(eq=False)
class Marks:
    """What is known of the tokens of a vocabulary: by id, whether it ends a line or a sentence; and control tokens."""

    lines: bytes
    sentences: bytes
    controls: frozenset[int]

    def ends(self, token: int, kind: bytes) -> bool:
        return token < len(kind) and kind[token] == 1


@frozen
class Survivors:
    """Ascending spans that do not touch. forced: those that no score decided."""

    spans: tuple[Span, ...]
    forced: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        return sum(stop - start for start, stop in self.spans)


def select(
    prompt: Tokens, scores: Sequence[float], parts: Sequence[PromptPart], marks: Marks, *, keep: int, most: int
) -> Survivors | None:
    """About `keep` tokens, and `most` at most; None where what may not be dropped does not even fit that."""
    held = merged([*must(prompt, parts, marks), (len(prompt) - 1, len(prompt))])
    cuts = list(pieces(prompt, parts, marks))
    taken = Spending(held, min(keep, most))
    if taken.count > most:
        return None
    ranked = sorted(range(len(cuts)), key=lambda at: (-mean(scores, cuts[at]), at))
    taken.add(cuts[-1])
    for at in ends(cuts, taken.budget):
        taken.add(cuts[at])
    known = set(taken.spans)
    best = [cuts[at] for at in ranked if cuts[at] not in known][: taken.budget // (BEST * PIECE)]
    for piece in best:  # before the anchors: code ends as it goes on everywhere, so they would take all that is left
        taken.add(piece)
    for at in anchored(prompt, cuts, marks):
        taken.add(cuts[at])
    forced = merged([span for span in taken.spans if span not in best])
    for at in ranked:
        taken.add(cuts[at])
    return Survivors(merged(taken.spans), forced)


class Spending:
    """Spans that are kept so far. What would go beyond the budget is not added."""

    def __init__(self, held: Sequence[Span], budget: int) -> None:
        self.spans, self.budget = list(held), budget
        self.count = sum(stop - start for start, stop in held)
        self._held = {token for start, stop in held for token in range(start, stop)}
        self._added = set[Span]()

    def add(self, piece: Span) -> None:
        if piece in self._added:
            return
        size = sum(token not in self._held for token in range(*piece))
        if self.count + size > self.budget:
            return
        self._added.add(piece)
        self.spans.append(piece)
        self.count += size


def must(prompt: Tokens, parts: Sequence[PromptPart], marks: Marks) -> Iterator[Span]:
    """Control tokens, what opens each message, and messages that are protected."""
    for at, token in enumerate(prompt):
        if token in marks.controls:
            yield at, at + 1
    for part in parts:
        if part.protected:
            yield part.start, part.stop
            continue
        header = prompt[part.start : min(part.stop, part.start + HEADER)]
        line = next((at + 1 for at, token in enumerate(header) if marks.ends(token, marks.lines)), 0)
        if line:
            yield part.start, part.start + line


def pieces(prompt: Tokens, parts: Sequence[PromptPart], marks: Marks) -> Iterator[Span]:
    """The whole prompt in order."""
    starts = sorted({part.start for part in parts if 0 < part.start < len(prompt)} | {len(prompt)})
    first = 0
    for stop in starts:
        while first < stop:
            last = cut(prompt, first, stop, marks)
            yield first, last
            first = last


def cut(prompt: Tokens, first: int, stop: int, marks: Marks) -> int:
    """Where a piece ends that begins there: with the line or the sentence that ends closest to 32 tokens."""
    if stop - first <= MOST:
        return stop
    choices = range(first + LEAST, first + MOST + 1)
    for kind in (marks.lines, marks.sentences):
        ends = [at for at in choices if marks.ends(prompt[at - 1], kind)]
        if ends:
            return min(ends, key=lambda at: (abs(at - first - PIECE), at))
    return first + PIECE


def ends(cuts: Sequence[Span], budget: int) -> Iterator[int]:
    """Pieces of the tail and of the head, three parts to one; of a small budget a third, as what scores has half."""
    share = min(1.0, budget / 3 / (HEAD + TAIL))
    for order, tokens in ((range(len(cuts) - 1, -1, -1), TAIL * share), (range(len(cuts)), HEAD * share)):
        sizes = accumulate(cuts[at][1] - cuts[at][0] for at in order)
        yield from (at for at, size in zip(order, sizes, strict=True) if size <= tokens)


def anchored(prompt: Tokens, cuts: Sequence[Span], marks: Marks) -> Iterator[int]:
    """Pieces where the prompt says what its end says again, the rarest first; every place counts. Those around them
    come behind all of them: in a small budget, the neighbours of words that meet by chance leave no room for others.
    """
    radius, limit = next((radius, limit) for pieces_, radius, limit in ANCHORS if len(cuts) < pieces_)
    body = max(0, len(prompt) - POOL)
    grams = {prompt[at : at + GRAM] for at in range(body, len(prompt) - GRAM + 1)}
    grams = {gram for gram in grams if not marks.controls.intersection(gram)}
    places: dict[Tokens, list[int]] = {}
    piece = 0
    for at in range(body - GRAM + 1):
        while cuts[piece][1] <= at:
            piece += 1
        gram = prompt[at : at + GRAM]
        if gram in grams:
            places.setdefault(gram, []).append(piece)
    rare = sorted((found for found in places.values() if len(found) <= limit), key=lambda one: (len(one), one))
    middles = list(dict.fromkeys(chain.from_iterable(rare)))
    yield from middles
    for away, middle in product(range(1, radius + 1), middles):
        yield from (at for at in (middle - away, middle + away) if 0 <= at < len(cuts))


def mean(scores: Sequence[float], span: Span) -> float:
    start, stop = span
    return sum(scores[start:stop]) / (stop - start)


def merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Their union, ascending, none touching the next."""
    found = list[Span]()
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)

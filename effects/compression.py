"""What may be left out of a prompt: who says what in it, how much of it is to stay, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

from attrs import frozen

from effects.ids import Span, Tokens

Mode: TypeAlias = Literal["off", "auto", "always"]

WHOLE = 1000  # thousandths


@frozen
class PromptPart:
    """A message of a prompt: its tokens `[start, stop)`, from just past what opens it. protected: it stays as it is.

    Of a message that has aged: keep, so many thousandths of it, once it is frozen; name, under which is kept what it
    was frozen to; kept, what that was, spans from its start on. None: it was not yet.
    """

    role: str
    start: int
    stop: int
    protected: bool = False
    keep: int = 0
    name: str = ""
    kept: tuple[Span, ...] | None = None

    @property
    def length(self) -> int:
        return self.stop - self.start

    def __attrs_post_init__(self) -> None:
        """Parts also come out of traces, which are hostile input."""
        edges = [0, *(at for span in self.kept or () for at in span), self.length]
        if not 0 <= self.keep <= WHOLE or edges != sorted(edges):
            raise ValueError(f"a part of a prompt that cannot be: {self}")


@frozen
class Compression:
    """What a request says of its prompt, checked and complete; the server has spoken where it did not."""

    mode: Mode = "off"
    threshold: int = 32_000  # prompt tokens still missing from which `auto` compresses
    keep: int = 50  # of the prompt, in thousandths
    parts: tuple[PromptPart, ...] = ()  # ascending; none where it is no conversation, or its mode is off
    continues: bool = False  # it has answers in it already
    tools: bool = False  # or functions that may be called
    freeze: bool = False  # shorten messages that have aged once and for all, and nothing else of a conversation
    least: int = 0  # tokens of such messages together that are worth it, where the prompt fits

    def __attrs_post_init__(self) -> None:
        """Jobs also come out of traces, which are hostile input."""
        edges = [at for part in self.parts for at in (part.start, part.stop)]
        natural = min(self.threshold, self.least, *edges[:1]) >= 0
        if not 1 <= self.keep <= WHOLE or edges != sorted(edges) or not natural:
            raise ValueError(f"a compression that cannot be: {self}")


@frozen
class Compressed:
    """What became of a prompt of `original` tokens, its frozen messages included."""

    original: int
    why_not: str = ""  # machine-readable; empty where something was left out
    kept: tuple[Span, ...] = ()  # spans of the original that are served, where that is not all of it
    forced: tuple[Span, ...] = ()  # those of them that no score decided
    keep: int = 0  # thousandths that were to be kept
    ns: int = 0  # what the drafter took for it


def remaining(parts: Sequence[PromptPart], length: int) -> tuple[Span, ...]:
    """What is served of a prompt of so many tokens: all but what its frozen messages have lost."""
    gaps = [gap for part in parts if part.kept is not None for gap in lost(part, part.kept)]
    edges = [0, *(at for gap in gaps for at in gap), length]
    return tuple((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)


def lost(part: PromptPart, kept: Sequence[Span]) -> Iterator[Span]:
    """Spans of the prompt that are no part of what is kept of a message."""
    edges = [part.start, *(part.start + at for span in kept for at in span), part.stop]
    yield from ((start, stop) for start, stop in list(pairwise(edges))[::2] if start < stop)


def taken(tokens: Tokens, spans: Sequence[Span]) -> Tokens:
    return tuple(token for start, stop in spans for token in tokens[start:stop])


def tokens_in(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)

"""Compression of prompts: the messages of a prompt, how much of each is to stay, and what became of it."""

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
    """A message of a prompt: its tokens `[start, stop)`, which begin behind the marker that opens the message.

    The client or the server's options say from which age on a message has aged: then `keep` is not 0. Such a message
    may be frozen, which means that it is shortened once and served in that form from then on.
    """

    role: str
    start: int
    stop: int
    protected: bool = False  # it is never shortened
    keep: int = 0  # thousandths of it that stay when it is frozen; 0: it has not aged
    name: str = ""  # under which its frozen form is remembered
    kept: tuple[Span, ...] | None = None  # its frozen form, as spans from its start on; None: it is not frozen yet

    @property
    def length(self) -> int:
        """The number of tokens of the message."""
        return self.stop - self.start

    def __attrs_post_init__(self) -> None:
        """Refuse impossible parts. Parts are also read from traces, which are hostile input."""
        edges = [0, *(at for span in self.kept or () for at in span), self.length]
        if not 0 <= self.keep <= WHOLE or edges != sorted(edges):
            raise ValueError(f"a part of a prompt that cannot be: {self}")


@frozen
class Compression:
    """The compression that a request allows for its prompt. The server's options fill in what it leaves open."""

    mode: Mode = "off"
    threshold: int = 32_000  # missing prompt tokens from which on `auto` compresses
    keep: int = 50  # of the prompt, in thousandths
    parts: tuple[PromptPart, ...] = ()  # ascending; none where the prompt is no conversation, or the mode is off
    continues: bool = False  # the conversation has answers already
    tools: bool = False  # the request has functions that may be called
    freeze: bool = False  # of a conversation, shorten only messages that have aged, each once and for all
    # Tokens that all aged messages have before they are frozen; fewer are frozen if the prompt does not fit.
    least: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse impossible values. Jobs are also read from traces, which are hostile input."""
        edges = [at for part in self.parts for at in (part.start, part.stop)]
        natural = min(self.threshold, self.least, *edges[:1]) >= 0
        if not 1 <= self.keep <= WHOLE or edges != sorted(edges) or not natural:
            raise ValueError(f"a compression that cannot be: {self}")


@frozen
class Compressed:
    """The result of compression for one prompt: what was left out, or why nothing was."""

    original: int  # tokens of the prompt, with its frozen messages in full
    why_not: str = ""  # machine-readable reason why nothing was left out; empty where something was
    kept: tuple[Span, ...] = ()  # spans of the original that are served; none where all of it is
    forced: tuple[Span, ...] = ()  # spans that are kept whatever their scores
    keep: int = 0  # thousandths that were to be kept
    ns: int = 0  # nanoseconds that the prompt scorer took


def select_remaining_spans(parts: Sequence[PromptPart], length: int) -> tuple[Span, ...]:
    """Return the spans that are served of a prompt of this many tokens: all but what frozen messages have lost."""
    gaps = [gap for part in parts if part.kept is not None for gap in find_dropped_spans(part, part.kept)]
    edges = [0, *(at for gap in gaps for at in gap), length]
    return tuple((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)


def find_dropped_spans(part: PromptPart, kept: Sequence[Span]) -> Iterator[Span]:
    """Yield the spans of the prompt that are dropped from a message. kept: spans from the message's start on."""
    edges = [part.start, *(part.start + at for span in kept for at in span), part.stop]
    yield from ((start, stop) for start, stop in list(pairwise(edges))[::2] if start < stop)


def select_tokens(tokens: Tokens, spans: Sequence[Span]) -> Tokens:
    """Return the tokens in these spans."""
    return tuple(token for start, stop in spans for token in tokens[start:stop])


def count_tokens(spans: Sequence[Span]) -> int:
    """Count the tokens in these spans together."""
    return sum(stop - start for start, stop in spans)

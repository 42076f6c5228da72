"""Conversations whose aged messages are frozen: which have aged, and what earlier requests have made of them.

What a message was frozen to is kept by a name that says which tokens it has, who scored it and how much was to be kept;
the edge gives it to every job that has the message. So what is served is certain before a slot is chosen, a job can be
run again from what it says, and a prompt grows at its end only, until so much has aged that more is frozen.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import msgspec
from attrs import define, evolve, field, frozen

from adapters.http.history.persistent_lru import DIGEST, UNREADABLE, Limits, PersistentLru, is_signed
from effects.compression import WHOLE, Compression, PromptPart, count_tokens, select_remaining_spans
from effects.ids import RequestId, Span, Tokens
from effects.job import Job, find_aged_messages
from effects.pflash import KeepFrozen

HOT = 2  # last messages, which stay as they are: what is spoken of
SHORTEST = 64  # tokens: of fewer, who says it and how it ends is most
LEAST = 512  # tokens of aged messages together: fewer are not worth bringing a drafter in
FRAME = 32  # tokens of a message that stay, beside what is to be kept: how it opens, how it closes, and what rounds up

MOST = 16_384  # messages, each in a file: 160 conversations of a hundred
MOST_BYTES = 16 << 20  # in memory, and as much on disk: 1 KiB each, some 80 spans written out
LARGEST = 1 << 18  # bytes of one
RULES = "2"  # by which messages are shortened; another number, and what was kept by other rules is not found

ENCODER, DECODER = msgspec.json.Encoder(), msgspec.json.Decoder(tuple[tuple[int, int], ...])


@define(eq=False)
class FrozenMessages(PersistentLru):
    """drafter: the identity of the one that scores.  found, missed: messages that had aged."""

    drafter: str = field(default="", kw_only=True)
    found: int = field(default=0, init=False)
    missed: int = field(default=0, init=False)

    what = "frozen messages"
    names = re.compile(r"frozen_[0-9a-f]{32}")

    @property
    def limits(self) -> Limits:
        return Limits(MOST, MOST_BYTES, LARGEST)

    def is_whole(self, raw: bytes) -> bool:
        if not is_signed(raw):
            return False
        try:
            spans = spans_in(raw)
        except UNREADABLE:
            return False
        edges = [at for span in spans for at in span]
        return edges == sorted(edges) and min(edges, default=0) >= 0

    def name(self, message: Tokens, keep: int, salt: str) -> str:
        """Nothing is found of messages of another salt."""
        packed = array("I", message).tobytes()
        asked = f"{RULES} {self.drafter} {keep} {salt} ".encode()
        return f"frozen_{blake2b(asked + packed, digest_size=16).hexdigest()}"

    def kept(self, name: str, length: int) -> tuple[Span, ...] | None:
        """Of a message of so many tokens."""
        raw = self.find(name)
        spans = None if raw is None else spans_in(raw)
        if spans is None or (spans and spans[-1][1] > length):
            self.missed += 1
            return None
        self.used(name)
        self.found += 1
        return spans

    def keep(self, _: RequestId, effect: KeepFrozen) -> None:
        for name, spans in effect.frozen:
            self.put(name, ENCODER.encode(spans))

    def figures(self) -> dict[str, Any]:
        return {
            "messages": len(self),
            "bytes": self.size,
            "found": self.found,
            "missed": self.missed,
            "damaged": self.damaged,
        }


def spans_in(raw: bytes) -> tuple[Span, ...]:
    """Raises msgspec.DecodeError for what was never written here."""
    return DECODER.decode(raw[DIGEST + 1 :])


@frozen
class Aging:
    """Of one request. ratio: thousandths that are kept of a message of so many tokens.  longest: tokens of one that the
    drafter can score.
    """

    memory: FrozenMessages
    ratio: Callable[[int], int]
    longest: int
    salt: str = ""

    def applied(self, compression: Compression, prompt: Tokens, messages: int) -> Compression:
        """With those of its messages marked that have aged, and what they were frozen to. messages: of the request."""
        if not (compression.freeze and compression.continues):
            return compression
        parts, band = compression.parts, band_of(compression.parts, messages)
        told = tuple(self._told(part, prompt) if at in band else part for at, part in enumerate(parts))
        return evolve(compression, parts=told, least=LEAST)

    def _told(self, part: PromptPart, prompt: Tokens) -> PromptPart:
        message = prompt[part.start : part.stop]
        keep = self.ratio(len(message))
        if not SHORTEST <= len(message) <= self.longest or keep == WHOLE:
            return part
        name = self.memory.name(message, keep, self.salt)
        return evolve(part, keep=keep, name=name, kept=self.memory.kept(name, len(message)))


def band_of(parts: Sequence[PromptPart], messages: int) -> range:
    """Which have aged: not the system's in front, or else not the first, and not the last ones. messages: there are so
    many, and perhaps the answer's opening; nothing, where it is not known who says what.
    """
    if any(part.role == "?" for part in parts):
        return range(0)
    leading = len(list(takewhile(lambda part: part.role == "system", parts)))
    opening = len(parts) > messages
    return range(max(1, leading), len(parts) - opening - HOT)


def frozen_length(job: Job) -> int:
    """Tokens of a prompt once all that has aged is frozen, at most."""
    gained = sum(max(0, part.length * (WHOLE - part.keep) // WHOLE - FRAME) for part in find_aged_messages(job))
    return count_tokens(select_remaining_spans(job.compression.parts, len(job.prompt))) - gained

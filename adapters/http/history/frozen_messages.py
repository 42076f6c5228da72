"""Freeze the aged messages of conversations: find those that have aged, and reuse what earlier requests made of them.

A frozen message is kept under a name that is made of its tokens, the identity of its scorer, and how much was to be
kept. The edge puts it into every job that has the message. So what is served is known before a slot is chosen, and a
job can be run again from its own data. A prompt then grows at its end only, until so much has aged that more messages
are frozen.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import takewhile

import msgspec
from attrs import define, evolve, field, frozen

from adapters.http.history.persistent_lru import DIGEST_CHARACTERS, UNREADABLE, Limits, PersistentLru, has_valid_digest
from effects.compression import WHOLE, Compression, PromptPart, count_tokens, select_remaining_spans
from effects.ids import RequestId, Span, Tokens
from effects.job import Job, find_aged_messages
from effects.prompt_compression import KeepFrozen

FRESH_MESSAGES = 2  # the last messages stay as they are: the conversation is about them
MIN_MESSAGE_TOKENS = 64  # tokens of a message: in a shorter one, most tokens are its opening and its end
MIN_AGED_TOKENS = 512  # tokens of all aged messages: fewer are not worth running the prompt scorer
# Tokens of a message that stay besides those to be kept: its opening, its end, and what rounding adds.
FRAME_TOKENS = 32

MAX_MESSAGES = 16_384  # messages, each in a file: 160 conversations of a hundred
MAX_BYTES = 16 << 20  # in memory, and as much on disk: 1 KiB each, some 80 spans written out
MAX_SPANS_BYTES = 1 << 18  # bytes of one record
RULES_VERSION = "2"  # of the rules by which messages are shortened: results of other rules are not found

ENCODER = msgspec.json.Encoder()
DECODER = msgspec.json.Decoder(tuple[tuple[int, int], ...])


@define(eq=False)
class FrozenMessages(PersistentLru):
    """The spans that are kept of frozen messages. scorer_identity: of the prompt scorer. hit_count, miss_count: of aged
    messages that were looked up.
    """

    scorer_identity: str = field(default="", kw_only=True)
    hit_count: int = field(default=0, init=False)
    miss_count: int = field(default=0, init=False)

    description = "frozen messages"
    name_pattern = re.compile(r"frozen_[0-9a-f]{32}")

    @property
    def limits(self) -> Limits:
        return Limits(MAX_MESSAGES, MAX_BYTES, MAX_SPANS_BYTES)

    def is_whole(self, raw: bytes) -> bool:
        if not has_valid_digest(raw):
            return False
        try:
            spans = decode_spans(raw)
        except UNREADABLE:
            return False
        edges = [at for span in spans for at in span]
        return edges == sorted(edges) and min(edges, default=0) >= 0

    def make_name(self, message: Tokens, keep: int, salt: str) -> str:
        """Return the name of a frozen message. A different salt gives a different name."""
        packed = array("I", message).tobytes()
        asked = f"{RULES_VERSION} {self.scorer_identity} {keep} {salt} ".encode()
        return f"frozen_{blake2b(asked + packed, digest_size=16).hexdigest()}"

    def find_spans(self, name: str, length: int) -> tuple[Span, ...] | None:
        """Return the kept spans of a message with this many tokens, or None."""
        raw = self.find(name)
        spans = None if raw is None else decode_spans(raw)
        if spans is None or (spans and spans[-1][1] > length):
            self.miss_count += 1
            return None
        self.mark_used(name)
        self.hit_count += 1
        return spans

    def store(self, _: RequestId, effect: KeepFrozen) -> None:
        for name, spans in effect.frozen:
            self.put(name, ENCODER.encode(spans))

    def count_figures(self) -> dict[str, int]:
        return {
            "messages": len(self),
            "bytes": self.size,
            "found": self.hit_count,
            "missed": self.miss_count,
            "damaged": self.damaged_count,
        }


def decode_spans(raw: bytes) -> tuple[Span, ...]:
    """Return the spans in a file. Raises msgspec.DecodeError for bytes that were never written here."""
    return DECODER.decode(raw[DIGEST_CHARACTERS + 1 :])


@frozen
class MessageFreezing:
    """Freezes the messages of one request.

    keep_of_length: returns the thousandths to keep of a message with this many tokens. max_scored_tokens: of a message
    that the prompt scorer takes.
    """

    memory: FrozenMessages
    keep_of_length: Callable[[int], int]
    max_scored_tokens: int
    salt: str = ""

    def apply(self, compression: Compression, prompt: Tokens, messages: int) -> Compression:
        """Return the compression with its aged messages marked, and with their spans if these are known. messages: how
        many the request has.
        """
        if not (compression.freeze and compression.continues):
            return compression
        parts = compression.parts
        aged = find_aged_range(compression.parts, messages)
        marked = tuple(self._add_spans(part, prompt) if at in aged else part for at, part in enumerate(parts))
        return evolve(compression, parts=marked, least=MIN_AGED_TOKENS)

    def _add_spans(self, part: PromptPart, prompt: Tokens) -> PromptPart:
        message = prompt[part.start : part.stop]
        keep = self.keep_of_length(len(message))
        if not MIN_MESSAGE_TOKENS <= len(message) <= self.max_scored_tokens or keep == WHOLE:
            return part
        name = self.memory.make_name(message, keep, self.salt)
        return evolve(part, keep=keep, name=name, kept=self.memory.find_spans(name, len(message)))


def find_aged_range(parts: Sequence[PromptPart], messages: int) -> range:
    """Return the indices of the parts that have aged: all but the leading system messages (or else the first part) and
    the last ones.

    messages: how many there are; one more part is the answer's opening. The range is empty if a speaker is unknown.
    """
    if any(part.role == "?" for part in parts):
        return range(0)
    leading = len(list(takewhile(lambda part: part.role == "system", parts)))
    opening = len(parts) > messages
    return range(max(1, leading), len(parts) - opening - FRESH_MESSAGES)


def estimate_frozen_length(job: Job) -> int:
    """Return the most tokens that a prompt has once all aged messages are frozen."""
    gained = sum(max(0, part.length * (WHOLE - part.keep) // WHOLE - FRAME_TOKENS) for part in find_aged_messages(job))
    return count_tokens(select_remaining_spans(job.compression.parts, len(job.prompt))) - gained

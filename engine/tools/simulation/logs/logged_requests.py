"""The common form of all logs: sessions of agents that send one request after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import chain
from typing import TypeVar

from attrs import frozen

from effects.ids import Tokens

T = TypeVar("T")
MOST_TOKENS = 1 << 22  # tokens of one prompt or answer
MOST_REQUESTS = 1 << 20  # requests of one file
LONE = re.compile("[\ud800-\udfff]")
DIGEST = 64  # bytes, and tokens, of one blake2b digest


class BadLog(Exception):
    """A file that cannot be simulated.

    The message is one line: the file, the field, what was found, what is accepted.
    """


@frozen(eq=False)
class Request:
    """One request.

    pieces: the prompt, end to end. Requests share pieces, so that long logs fit in memory.
    at_ns: the time when it was sent, by the session's clock.
    pause_ns: the least time that its client waits after an answer.
    boundaries: ascending prompt positions at which a message begins.
    """

    at_ns: int
    pieces: tuple[Tokens, ...]
    answer: Tokens
    boundaries: Tokens = ()
    pause_ns: int = 0

    @property
    def length(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def prompt(self) -> Tokens:
        return tuple(chain.from_iterable(self.pieces))


@frozen(eq=False)
class Agent:
    """Requests in order of time. Each is sent only when the one before it has been answered."""

    requests: tuple[Request, ...]


@frozen(eq=False)
class Session:
    """An agent and its subagents. absolute: their times are of one clock that all such sessions share."""

    name: str
    agents: tuple[Agent, ...]
    absolute: bool = False

    @property
    def start_ns(self) -> int:
        return min(agent.requests[0].at_ns for agent in self.agents)

    @property
    def count(self) -> int:
        return sum(len(agent.requests) for agent in self.agents)


def shorten_value(value: object) -> str:
    """Return a value that is not accepted, shortened for a message."""
    plain = value is None or isinstance(value, bool | int | float | str)
    return " ".join(str(value)[:40].split()) if plain else f"a JSON {'object' if isinstance(value, dict) else 'list'}"


def read_text(value: str, where: str) -> str:
    """Return the text if it can be encoded.

    JSON can hold halves of characters, which no encoding has. Raises BadLog.
    """
    if LONE.search(value):
        raise BadLog(f"{where}: half a surrogate pair in a text; accepted: Unicode")
    return value


def make_tokens(name: str, length: int) -> Tokens:
    """Return tokens that stand for an unknown text, always the same for one name. They are small, to save memory."""
    digests = (blake2b(f"{name}\0{at}".encode(), digest_size=DIGEST).digest() for at in range(0, length, DIGEST))
    return tuple(chain.from_iterable(digests))[:length]


def list_earlier_ends(earlier: Sequence[tuple[int, T, Sequence[int]]], begins: Callable[[int, T], bool]) -> list[int]:
    """Return the ends of earlier prompts with which this one begins.

    Each earlier prompt is (length, its name, its own ends).
    """
    ends = set[int]()
    for length, name, own in reversed(earlier):
        if length not in ends and begins(length, name):
            ends.update(own, (length,))
    return sorted(ends)


def find_message_starts(length: int, marked: Iterable[int], earlier: Sequence[int]) -> Tokens:
    """Return the safe boundaries of a prompt of `length` tokens.

    These are the marked positions, the ends of earlier prompts with which it begins (an answer begins there), and its
    own end.
    """
    return tuple(sorted({at for at in (*marked, *earlier, length) if 0 < at <= length}))

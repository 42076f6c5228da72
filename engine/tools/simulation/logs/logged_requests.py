"""The form that every log is read into: sessions of agents that send one request after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import chain
from typing import TypeVar

from attrs import frozen

from effects.ids import Tokens

T = TypeVar("T")
MOST_TOKENS = 1 << 22  # of one prompt or answer
MOST_REQUESTS = 1 << 20  # of one file
LONE = re.compile("[\ud800-\udfff]")
DIGEST = 64  # bytes, and tokens, of one blake2b digest


class BadLog(Exception):
    """A file that cannot be simulated. One line: which file, where in it, what was found and what is accepted."""


@frozen(eq=False)
class Request:
    """One request. `pieces` are the prompt, end to end; requests share them, so that long logs fit in memory.

    at_ns: when it was sent, by the session's clock. pause_ns: its client waits at least so long after an answer.
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
    """Requests in order of time, each sent only when the one before it has been answered."""

    requests: tuple[Request, ...]


@frozen(eq=False)
class Session:
    """An agent and its subagents. absolute: times are of one clock that all such sessions share."""

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
    """A text from JSON, which can hold halves of characters that no encoding has. Raises BadLog."""
    if LONE.search(value):
        raise BadLog(f"{where}: half a surrogate pair in a text; accepted: Unicode")
    return value


def make_tokens(name: str, length: int) -> Tokens:
    """Tokens that stand for a text nobody has: always the same for one name. Small numbers, which take no memory."""
    digests = (blake2b(f"{name}\0{at}".encode(), digest_size=DIGEST).digest() for at in range(0, length, DIGEST))
    return tuple(chain.from_iterable(digests))[:length]


def list_earlier_ends(earlier: Sequence[tuple[int, T, Sequence[int]]], begins: Callable[[int, T], bool]) -> list[int]:
    """Return where earlier prompts end that this one begins with. Each is (length, its name, its own ends)."""
    ends = set[int]()
    for length, name, own in reversed(earlier):
        if length not in ends and begins(length, name):
            ends.update(own, (length,))
    return sorted(ends)


def find_message_starts(length: int, marked: Iterable[int], earlier: Sequence[int]) -> Tokens:
    """Safe boundaries of a prompt of `length` tokens: marked positions, ends of earlier prompts that it begins with (an
    answer begins there), and its own end.
    """
    return tuple(sorted({at for at in (*marked, *earlier, length) if 0 < at <= length}))

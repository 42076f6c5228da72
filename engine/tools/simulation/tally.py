"""Counts of a simulation, request by request, and what an infinite cache would have had."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field, frozen

from effects.ids import RequestId, Tokens
from effects.scope import Scope


@define
class RequestTally:
    """One request. Tokens, and nanoseconds of the virtual clock."""

    place: int  # of the request among all that the logs have
    prompt: int
    sent: int
    infinite: int  # tokens of the prompt that an earlier prompt and its answer begin with, in whole blocks
    device: int = 0  # that its slot started with
    found: int = 0  # that the device and the store had together, usable
    restored: int = 0  # that were not computed again
    served: int = 0  # of the prompt, once it was compressed
    tier: str = "none"
    selected: int = 0  # that the scope takes; 0: none, or too few to be kept
    needed: int = 0  # of those, what can be found: whole blocks, and never the last token
    first: int = 0  # when its first token came
    closed: int = 0

    @property
    def is_whole_hit(self) -> bool:
        """Was all of what the scope selects there?"""
        return 0 < self.needed <= self.found

    @property
    def first_ms(self) -> float:
        return (self.first - self.sent) / 1e6


@define
class InfiniteCache:
    """A cache that forgets nothing: every block of every prompt and answer, by what it continues."""

    block_size: int
    blocks: set[int] = field(factory=set[int])

    def chain_blocks(self, tokens: Tokens) -> list[int]:
        link = 0
        links = list[int]()
        block_size = self.block_size
        for start in range(0, len(tokens) - block_size + 1, block_size):
            link = hash((link, tokens[start : start + block_size]))
            links.append(link)
        return links

    def count_shared_tokens(self, prompt: Tokens, answer: Tokens) -> int:
        """How many tokens of the prompt are there and usable: its last one never is. From now on all of it is there,
        and of the answer all but the last token, which is fed to nobody.
        """
        links = self.chain_blocks(prompt + answer[:-1])
        usable = links[: (len(prompt) - 1) // self.block_size]
        there = next((number for number, link in enumerate(usable) if link not in self.blocks), len(usable))
        self.blocks.update(links)
        return there * self.block_size


@define
class Tally:
    """Everything about one run."""

    infinite: InfiniteCache
    counts: dict[RequestId, RequestTally] = field(factory=dict[RequestId, RequestTally])
    checkpoints: int = 0  # bytes of what was written
    written: list[tuple[int, int]] = field(factory=list["tuple[int, int]"])  # (nanoseconds, bytes so far)
    restarts: list[int] = field(factory=list[int])  # nanoseconds

    def add_write(self, now: int, size: int, *, checkpoint: bool = False) -> None:
        before = self.written[-1][1] if self.written else 0
        self.checkpoints += size * checkpoint
        self.written.append((now, before + size))


@frozen
class FinishedRun:
    """The result of a run. scope None: nothing was kept. counts: in the order in which requests were sent."""

    name: str
    scope: Scope | None
    figures: Figures
    counts: Sequence[RequestTally]
    written: Sequence[tuple[int, int]]
    restarts: Sequence[int]


@frozen
class Figures:
    """A run in numbers, as a table and JSON show it. Bytes count what would lie on disk, stored plainly."""

    scope: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_share: float  # of the prompt tokens
    infinite_hit_tokens: int
    infinite_share: float
    of_infinite: float
    restored_tokens: int
    served_tokens: int
    whole_hits: int
    selected_mean: float
    selected_last: int
    written_bytes: int
    checkpoint_bytes: int  # of those
    unique_bytes: int
    written_of_unique: float
    evictions: int
    dropped_writes: int
    disk_bytes: int
    restarts: int
    first_token_ms: tuple[float, float]  # median, 90th percentile


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def compute_share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

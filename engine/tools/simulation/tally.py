"""Counts the outcomes of a simulation, request by request, and those of an infinite cache."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field, frozen

from effects.ids import RequestId, Tokens
from effects.scope import Scope


@define
class RequestTally:
    """The figures of one request: tokens, and nanoseconds of the virtual clock."""

    index: int  # of the request among all that the logs have
    prompt: int
    sent: int
    infinite: int  # prompt tokens in whole blocks that an earlier prompt and its answer begin with
    device: int = 0  # tokens that its slot had at the start
    found: int = 0  # usable tokens that the device and the store had together
    restored: int = 0  # tokens that were restored
    served: int = 0  # prompt tokens after compression
    followed: int = 0  # tokens of these that another request computed while this one waited for them
    tier: str = "none"
    selected: int = 0  # tokens that the scope selects; 0: none, or too few to be kept
    needed: int = 0  # those of them that can be found: whole blocks without the last token
    first: int = 0  # time of the first token
    closed: int = 0

    @property
    def is_whole_hit(self) -> bool:
        """Return whether everything that the scope selects was found."""
        return 0 < self.needed <= self.found

    @property
    def first_ms(self) -> float:
        return (self.first - self.sent) / 1e6


@define
class InfiniteCache:
    """A cache that forgets nothing. It keeps every block of every prompt and answer, by the blocks before it."""

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
        """Return how many prompt tokens are cached and usable, and add the prompt and its answer.

        The last prompt token is never usable. The last token of the answer is never computed, so it is not added.
        """
        links = self.chain_blocks(prompt + answer[:-1])
        usable = links[: (len(prompt) - 1) // self.block_size]
        there = next((number for number, link in enumerate(usable) if link not in self.blocks), len(usable))
        self.blocks.update(links)
        return there * self.block_size


@define
class Tally:
    """The figures of one run."""

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
    """The result of a run. scope: None if nothing was kept. counts: in the order in which requests were sent."""

    name: str
    scope: Scope | None
    figures: Figures
    counts: Sequence[RequestTally]
    written: Sequence[tuple[int, int]]
    restarts: Sequence[int]


@frozen
class Figures:
    """The figures of a run, as table and JSON show them. Bytes are those of uncompressed files on disk."""

    scope: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_share: float  # of the prompt tokens
    infinite_hit_tokens: int
    infinite_share: float
    of_infinite: float
    restored_tokens: int
    followed_tokens: int
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


def compute_quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, interpolated between neighbours. It is 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    index = share * (len(ordered) - 1)
    low = int(index)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (index - low)


def compute_share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

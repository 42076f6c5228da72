"""Pages of KV memory: which of them a slot holds, who may have more, and why nobody waits for them for ever.

All slots take pages from one pool, as many as the prompt needs when a request is admitted, and more as its answer
grows. Where the device can read the same page for several slots, a prefix is shared and not copied.

A request claims what it may need at most: its prompt and `max_tokens`. Nothing is admitted that claims more than the
pool has, and pages are given only where, afterwards, some order is left in which everybody who runs can have all that
they claim, one after the other, each from what is free and what those before have given back (Dijkstra's banker, EWD
623). So whoever is first in that order can always go on, ends, and gives its pages back; the others wait for that with
their rows in place. Nobody is preempted, nothing is computed twice, and no cycle of waiting can come about. Sequences
that nobody holds a slot for are no claim at all: their pages are taken wherever they are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from effects.ids import PageId
from effects.job import Job
from states.settings import Settings

Pages: TypeAlias = tuple[PageId, ...]  # of a slot, in the order of its rows


def needed(rows: int, page: int) -> int:
    """Pages of so many rows."""
    return -(-rows // page)


def claim(settings: Settings, job: Job) -> int:
    """What it may come to hold. A prompt that is longer than the context is shortened before it is served."""
    return needed(min(len(job.prompt) + job.max_tokens, settings.max_context), settings.page)


def safe(running: Sequence[tuple[Pages, int]], total: int) -> bool:
    """Can all that run be given what they claim, one after the other? running: what each holds, and claims.

    Who wants least is first: nobody else could go on if that one cannot. A page comes free with the last that has it.
    """
    holders = Counter(page for held, _ in running for page in held)
    left = total - len(holders)
    for held, most in sorted(running, key=lambda one: one[1] - len(one[0])):
        if most - len(held) > left:
            return False
        holders.subtract(held)
        left += sum(holders[page] == 0 for page in held)
    return True


def free(held: Iterable[Pages], total: int, count: int) -> Pages | None:
    """The first so many that nobody holds."""
    taken = {page for pages in held for page in pages}
    if count > total - len(taken):
        return None
    spare = (PageId(number) for number in range(total) if number not in taken)
    return tuple(page for page, _ in zip(spare, range(count), strict=False))


def use(busy: Iterable[Pages], idle: Iterable[Pages], total: int) -> dict[str, int]:
    """How many are held by requests, how many only by prompts that stay warm, and how many by nobody."""
    running = {page for pages in busy for page in pages}
    warm = {page for pages in idle for page in pages} - running
    return {"busy": len(running), "idle": len(warm), "free": total - len(running) - len(warm)}


def kept(source: Pages, keep: int, page: int, others: Collection[PageId], *, shared: bool) -> list[PageId | None]:
    """Of the pages of the source's first `keep` rows those that may be gone on with; None: its rows have to be copied.

    others: what other slots hold. shared: a page whose rows are all kept may be theirs, too: nobody writes it again.
    """
    return [
        one if one not in others or (shared and (number + 1) * page <= keep) else None
        for number, one in enumerate(source[: needed(keep, page)])
    ]

"""Pages: slots take the memory for their rows from one pool of equal pages, and slots may share a page.

Problem. If every slot had memory for the longest sequence, most of it would be unused. If pages are given out as
answers grow, requests may block each other: each has some pages, each waits for more, and none can go on.

Idea. A request claims the pages that it may need at most: those of its prompt and of `max_tokens`. No request is
admitted that claims more than the whole pool. Pages are given only if, afterwards, all running requests can still end
in some order: each can get all that it claims, from what is free and what the ones before it have given back
(Dijkstra's banker's algorithm, EWD 623). So the first request in that order can always go on, ends, and gives its pages
back. The others wait with their rows in place. No request is preempted, nothing is computed twice, and no cycle of
waiting can arise.

Requests that claim more than there is may still wait a long time: all have grown until the pool is full, and then only
the few go on that can get all that they claim. So more than MANY requests run only if the pool has room for what they
claim, or for SHORT_SEQUENCE rows of it.

Idle slots have no claim: their pages are taken whenever they are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from effects.ids import PageId
from effects.job import Job
from states.settings import Settings

Pages: TypeAlias = tuple[PageId, ...]  # of a slot, in the order of its rows

MANY = 16  # requests that may run at once whatever they claim
SHORT_SEQUENCE = 4096  # rows that the pool must have for each, if more run and it may come to hold as many


def count_pages(rows: int, page_rows: int) -> int:
    """Count the pages that this many rows take."""
    return -(-rows // page_rows)


def compute_claim(settings: Settings, job: Job) -> int:
    """Return the number of pages that a job may come to hold. A prompt longer than the context is shortened first."""
    return count_pages(min(len(job.prompt) + job.max_tokens, settings.max_context), settings.page)


def can_all_finish(running: Sequence[tuple[Pages, int]], total: int) -> bool:
    """Can all running requests get what they claim, one after the other? running: what each holds, and its claim.

    The request that wants fewest more is tried first: if that one cannot go on, no other can. A page comes free with
    the last request that has it. As a rule there are free pages for all claims at once, and then no order matters.
    """
    free_count = total - len(collect_pages(held for held, _ in running))
    if sum(max(0, claim - len(held)) for held, claim in running) <= free_count:
        return True
    holders = Counter(page for held, _ in running for page in held)
    for held, claim in sorted(running, key=lambda holding: holding[1] - len(holding[0])):
        if claim - len(held) > free_count:
            return False
        holders.subtract(held)
        free_count += sum(holders[page] == 0 for page in held)
    return True


def have_room(running: Sequence[tuple[Pages, int]], settings: Settings) -> bool:
    """Return whether so many requests may run at once. running: as in `can_all_finish`."""
    if len(running) <= MANY:
        return True
    most = count_pages(SHORT_SEQUENCE, settings.page)
    free_count = settings.pages - len(collect_pages(held for held, _ in running))
    return sum(max(0, min(claim, most) - len(held)) for held, claim in running) <= free_count


def collect_pages(held: Iterable[Pages]) -> set[PageId]:
    """Return every page that any of these slots has. There may be thousands, and this runs for each page given out."""
    return set[PageId]().union(*held)


def find_free_pages(held: Iterable[Pages], total: int, count: int) -> Pages | None:
    """Return the first `count` pages that no slot has; None: there are fewer."""
    taken = collect_pages(held)
    if count > total - len(taken):
        return None
    free = (PageId(number) for number in range(total) if number not in taken)
    return tuple(page for page, _ in zip(free, range(count), strict=False))


def count_use(busy: Iterable[Pages], idle: Iterable[Pages], total: int) -> dict[str, int]:
    """Count the pages that requests hold, those that only idle slots have, and those that are free."""
    running = collect_pages(busy)
    warm = collect_pages(idle) - running
    return {"busy": len(running), "idle": len(warm), "free": total - len(running) - len(warm)}


def select_reusable_pages(
    source: Pages, keep: int, page_rows: int, others: Collection[PageId], *, shared: bool
) -> list[PageId | None]:
    """Return the pages of the source's first `keep` rows that another prompt can go on in; None: to be copied.

    others: pages that other slots have. shared: such a page can be used as well, if all of its rows are kept, because
    it is never written again then.
    """
    return [
        page if page not in others or (shared and (number + 1) * page_rows <= keep) else None
        for number, page in enumerate(source[: count_pages(keep, page_rows)])
    ]

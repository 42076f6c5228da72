"""The blocks of a DFlash draft: how many rows a block takes, and which requests share a forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adapters.models.drafts.cached_draft import BlockRequest

# The most rows of one draft forward, which bounds the memory that attention needs. Further requests wait for the next
# forward.
MOST_ROWS = 128
SMALLEST_BLOCK = 4


def count_block_rows(request: BlockRequest, block: int) -> int:
    """Return the rows of the block that holds a request's proposals.

    The draft was trained on blocks of B rows, and it also works with smaller ones.
    """
    rows = SMALLEST_BLOCK
    while rows < request.count + 1:
        rows *= 2
    return min(rows, block)


def group_requests(requests: Sequence[BlockRequest], block: int, most: int) -> Iterator[list[BlockRequest]]:
    """Group the requests in order, each group with at most `most` rows. block: B."""
    turn: list[BlockRequest] = []
    rows = 0
    for request in requests:
        if turn and rows + count_block_rows(request, block) > most:
            yield turn
            turn = []
            rows = 0
        turn.append(request)
        rows += count_block_rows(request, block)
    yield turn

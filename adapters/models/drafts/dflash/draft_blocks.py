"""Blocks of a draft: how many rows they take, and which of them are proposed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adapters.models.drafts.cached_draft import BlockRequest

# Rows of one draft forward: more blocks than fit are proposed to in turns, which bounds what attention needs.
MOST_ROWS = 128
SMALLEST_BLOCK = 4


def block_rows(request: BlockRequest, block: int) -> int:
    """The block's size for its proposals: the draft was trained on blocks of B and bears smaller ones."""
    rows = SMALLEST_BLOCK
    while rows < request.count + 1:
        rows *= 2
    return min(rows, block)


def turns(requests: Sequence[BlockRequest], block: int, most: int) -> Iterator[list[BlockRequest]]:
    """As many together as fit `most` rows."""
    turn: list[BlockRequest] = []
    rows = 0
    for request in requests:
        if turn and rows + block_rows(request, block) > most:
            yield turn
            turn = []
            rows = 0
        turn.append(request)
        rows += block_rows(request, block)
    yield turn

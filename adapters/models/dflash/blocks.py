"""Blocks of a draft: how many rows they take, and which of them are proposed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

from adapters.models.shard import Segment

# Rows of one draft forward: more blocks than fit are proposed to in turns, which bounds what attention needs.
MOST_ROWS = 128
SMALLEST_BLOCK = 4


@frozen
class BlockRequest:
    """A slot that wants `count` proposals after `token`.

    Context rows `[first, position)` are valid; token is the slot's last one, which the target has not been fed yet:
    it will be at `position`. The proposals are for `position + 1` and on.
    """

    slot: int
    first: int
    position: int
    token: int
    count: int

    def rows(self, block: int) -> int:
        """The block's size for so many proposals: the draft was trained on blocks of B and bears smaller ones."""
        rows = SMALLEST_BLOCK
        while rows < self.count + 1:
            rows *= 2
        return min(rows, block)

    def segment(self, block: int) -> Segment:
        return Segment(self.slot, self.position, self.rows(block))


def turns(requests: Sequence[BlockRequest], block: int, most: int) -> Iterator[list[BlockRequest]]:
    """As many together as fit `most` rows."""
    turn: list[BlockRequest] = []
    rows = 0
    for request in requests:
        if turn and rows + request.rows(block) > most:
            yield turn
            turn, rows = [], 0
        turn.append(request)
        rows += request.rows(block)
    yield turn


def check_requests(
    requests: Sequence[BlockRequest], *, slots: int, capacity: int, block: int, vocab: int
) -> Sequence[BlockRequest]:
    """Raises ValueError for what cannot be proposed to."""
    if not requests or len({request.slot for request in requests}) != len(requests):
        raise ValueError("nothing is asked, or a slot asks twice")
    for request in requests:
        if not 0 <= request.slot < slots:
            raise ValueError(f"slot {request.slot} is not in 0..{slots - 1}")
        if not 0 <= request.first <= request.position <= capacity:
            raise ValueError(f"context rows {request.first}..{request.position} are not within {capacity} rows")
        if not 1 <= request.count < block:
            raise ValueError(f"{request.count} proposals; accepted: 1..{block - 1}")
        if not 0 <= request.token < vocab:
            raise ValueError(f"token {request.token} is not in 0..{vocab - 1}")
    return requests

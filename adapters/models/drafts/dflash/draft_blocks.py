"""The blocks of a DFlash draft: how many rows a block takes, and which requests share a forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

from adapters.models.drafts.cached_draft import BlockRequest

# The most rows of one draft forward, which bounds the memory that attention needs. Further requests wait for the next
# forward.
MOST_ROWS = 128
SMALLEST_BLOCK = 4


@frozen
class BlockSizes:
    """The sizes of a draft's blocks. most: rows of the largest. lead: rows before the one of the first proposal."""

    most: int
    lead: int

    def count_rows(self, proposals: int) -> int:
        """Return the rows of the block that holds so many proposals.

        The draft was trained on the largest blocks, and it also works with smaller ones.
        """
        rows = SMALLEST_BLOCK
        while rows < proposals + self.lead:
            rows *= 2
        return min(rows, self.most)

    def list_sizes(self) -> list[int]:
        """Return the rows of blocks of every size, ascending."""
        return sorted({min(SMALLEST_BLOCK << doubled, self.most) for doubled in range(self.most.bit_length())})

    def group_requests(self, requests: Sequence[BlockRequest], most: int) -> Iterator[list[BlockRequest]]:
        """Group the requests in order, each group with at most `most` rows."""
        turn: list[BlockRequest] = []
        rows = 0
        for request in requests:
            if turn and rows + self.count_rows(request.count) > most:
                yield turn
                turn = []
                rows = 0
            turn.append(request)
            rows += self.count_rows(request.count)
        yield turn

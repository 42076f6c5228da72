"""One restore in flight: the moves that it consists of, which of them are done, and why it ended early.

The restorer (`restorer.py`, whose head tells the whole story) creates a `Restore` for each effect. Its threads and the
lane change it at the same time. For each part, a move is copied by one thread only.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from attrs import define

from adapters.models.decoder.shard import NamedTensors
from adapters.store.files.file_format import Kind
from adapters.store.lease import Lease, LeasedPart
from adapters.store.slab_memory import Buffer
from adapters.transfer.copy_rows import BufferedRun, RowMover
from adapters.transfer.fence import Fence
from effects.ids import Span, StoreFailed
from effects.ports import RowsLost
from effects.restore import RestoreBlocks

log = logging.getLogger("rekindle.store")

ABANDONED = StoreFailed("abandoned", "the request was abandoned")
QueuedCopies: TypeAlias = "deque[tuple[RowMover, RunMove]]"


@define(eq=False)
class RunMove:
    """One move of a restore: some rows of one entry of the store, or its checkpoint, on their way into the slot.

    part: the entry that they come from. span: the rows, as positions in the slot's sequence; for a checkpoint, the rows
    of the last block before it. missing_movers: the movers that have not copied or sent them yet; there is a mover for
    each part of the target, or of the draft, and none for a checkpoint. buffer: the host memory that has them, from the
    end of reading until all movers are done; a checkpoint keeps it until the end of the restore. staged: a checkpoint
    that was brought to its device.
    """

    part: LeasedPart
    span: Span
    missing_movers: list[RowMover]
    buffer: Buffer | None = None
    failure: StoreFailed | None = None
    staged: NamedTensors | None = None

    @property
    def kind(self) -> Kind:
        """The kind of its entry: rows of the target, rows of the draft, or a checkpoint."""
        return self.part.entry.kind

    @property
    def buffered_run(self) -> BufferedRun:
        """Its rows, the memory that has them, and the row that this memory begins with."""
        assert self.buffer is not None
        return self.span, self.buffer.data, self.part.entry.start


@define(eq=False)
class Restore:
    """The state of one restore.

    moves: the target's rows in ascending order, then the draft's, then the checkpoint. failure: why it ended early; the
    target's rows before the first move that failed still count.
    """

    effect: RestoreBlocks
    fence: Fence
    moves: tuple[RunMove, ...]
    abandoned: bool = False
    failure: StoreFailed | None = None

    @property
    def is_over(self) -> bool:
        """Say whether moves that are not done yet are of no use any more."""
        return self.abandoned or self.failure is not None

    def copy_run(self, mover: RowMover, move: RunMove) -> None:
        """Copy one move into one part of the target or of the draft."""
        if self._attempt(partial(mover.copy_in, self.effect.slot, *move.buffered_run, self.fence.cuda_events), [move]):
            move.missing_movers.remove(mover)

    def send_runs(self, mover: RowMover, moves: Sequence[RunMove]) -> None:
        """Send the moves to a part in another process, unless they were sent before. Called on the lane.

        It does not wait for the part: later calls to it come behind these, and raise if these have failed.
        """
        coming = [move for move in moves if mover in move.missing_movers]
        if coming and not self.is_over:
            runs = [move.buffered_run for move in coming]
            keep = [move.buffer for move in coming]
            if self._attempt(partial(mover.send_runs, self.effect.slot, runs, keep), coming):
                for move in coming:
                    move.missing_movers.remove(mover)

    def _attempt(self, work: Callable[[], object], moves: Sequence[RunMove]) -> bool:
        try:
            work()
        except (ValueError, RuntimeError, RowsLost) as error:  # a device that finds no memory is a RuntimeError
            self.record_failure(moves, StoreFailed("broken", str(error)))
            return False
        return True

    def copy_queued(self, moves: QueuedCopies) -> None:
        """Copy moves until the queue is empty. Several threads may take from the same queue."""
        while moves and not self.is_over:
            with suppress(IndexError):
                self.copy_run(*moves.popleft())

    def record_failure(self, moves: Sequence[RunMove], why: StoreFailed) -> None:
        """Note that these moves failed. Only missing rows of the target end the restore."""
        for move in moves:
            move.failure = move.failure or why
            if move.kind == "rows":
                self.failure = self.failure or why
            else:
                log.warning("restored without the data of the draft or the state (%s): %s", move.kind, why.detail)

    def collect_ready(self) -> list[RunMove]:
        """Return the moves that the slot may count as its rows, and note a failure if some of the target's are missing.

        Of the target these are the moves before the first one that was not copied. Of the draft they are all that were
        copied, since a draft may have gaps. A checkpoint is none of them: the restorer puts it into the slot by itself.
        """
        rows = [move for move in self.moves if move.kind == "rows"]
        gap = next((at for at, move in enumerate(rows) if move.missing_movers), len(rows))
        if gap < len(rows):
            self.failure = self.failure or ABANDONED
        return rows[:gap] + [move for move in self.moves if move.kind == "draft" and not move.missing_movers]


def plan_moves(lease: Lease, effect: RestoreBlocks, movers: Mapping[Kind, Sequence[RowMover]]) -> Iterator[RunMove]:
    """Yield a move for each leased part with rows that the effect asks for, and one for its checkpoint."""
    for part in (*lease.parts, *lease.draft):
        start = max(part.start, effect.start)
        stop = min(part.stop, effect.stop)
        if start < stop and movers[part.entry.kind]:
            yield RunMove(part, (start, stop), list(movers[part.entry.kind]))
    for part in lease.states:
        if part.stop == effect.stop:
            yield RunMove(part, (part.start, part.stop), [])

"""The moves that one task of a restore reads, one batch after another, on a thread of a tier.

The problem: at the speed of memory a batch takes two milliseconds. A thread that returned to the event loop after each
one would wait a third of its time: for the loop, the interpreter and the processor (decision 075).

How it works. Tasks share a queue of moves. A task lends its tier a source (`MoveChain.take`), which the thread that
reads asks for the next moves. Moves whose rows are copied already need nothing more. Some may not be copied, because
the slot is not open yet or the lane has to send them. Then the source returns nothing, and the event loop goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from attrs import define, field

from adapters.store.files.file_format import Layout
from adapters.store.run_read import RunRead, take_batch
from adapters.store.slab_memory import Buffer
from adapters.transfer.run_moves import Restore, RunMove
from effects.ids import StoreFailed, Tier


@define(eq=False)
class MoveQueue:
    """Moves that are to be read. tasks: how many tasks take from it, on any threads."""

    moves: deque[RunMove]
    tasks: int
    layout: Layout
    _lock: threading.Lock = field(factory=threading.Lock)

    def get_next_tier(self) -> Tier | None:
        """Return the tier that the next move is read from; None if there is no move."""
        with self._lock:
            return self.moves[0].part.tier if self.moves else None

    def take(self, tier: Tier, batch_bytes: int) -> list[RunMove]:
        """Take the moves that are read together next, none if the next one is not read from this tier."""
        with self._lock:
            if not self.moves or self.moves[0].part.tier != tier:
                return []
            return take_batch(self.moves, self.tasks, batch_bytes, self._describe)

    def _describe(self, move: RunMove) -> tuple[Tier, int]:
        entry = move.part.entry
        return move.part.tier, self.layout.compute_size(entry.kind, entry.length)


@define(eq=False)
class MoveChain:
    """A source of reads for one call of a tier.

    copy: called with a move and its rows on the thread that has read them.
    """

    restore: Restore
    queue: MoveQueue
    batch_bytes: int
    tier: Tier
    copy: Callable[[RunMove, Buffer], object]
    _moves: Sequence[RunMove] = ()
    _reads: Sequence[RunRead] = ()
    _uncopied: list[RunMove] = field(factory=list[RunMove])

    def take(self) -> Sequence[RunRead]:
        """Return the runs to read next (`ReadSource`)."""
        self.settle()
        if self.restore.is_over or self._uncopied:
            return ()
        self._moves = self.queue.take(self.tier, self.batch_bytes)
        self._reads = [RunRead(move.part.entry, partial(self.copy, move)) for move in self._moves]
        return self._reads

    def settle(self) -> None:
        """Note what has become of the runs that were read last. Memory of copied rows is free then."""
        for move, read in zip(self._moves, self._reads, strict=True):
            if read.error is not None:
                self.restore.record_failure([move], describe_failure(read.error))
            elif move.kind != "state" and not move.missing_movers:
                move.buffer = None
        self._reads = ()
        self._uncopied += [move for move in self._moves if move.missing_movers and move.failure is None]
        self._moves = ()

    def list_uncopied(self) -> list[RunMove]:
        """Return the moves that were read last and not copied yet, once they are settled."""
        return self._uncopied


def describe_failure(error: Exception) -> StoreFailed:
    """Return the failure of a run that could not be read."""
    if isinstance(error, MemoryError):
        return StoreFailed("out_of_memory", "no memory to read into")
    if isinstance(error, OSError):
        return StoreFailed("io", error.strerror or str(error))
    return StoreFailed("broken", str(error))

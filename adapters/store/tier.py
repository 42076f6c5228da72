"""What the store needs of a tier: an index of what is kept there, and, of a lower one, that it takes what it is given.

A tier is added here: host memory (host.py) and the disk (disk.py) are tiers, as is the simulated disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

from attrs import frozen

from adapters.store.block_index import Entry, Index
from adapters.store.files.file_format import Run
from adapters.store.recent_prompts import Recent, Recents
from adapters.store.slab_memory import Buffer
from adapters.watched_thread import WatchedThread

StateCheckpoint: TypeAlias = Literal["host", "disk"]


@frozen(eq=False)
class Write:
    """A run on its way to a lower tier. done: it has been written, or given up."""

    run: Run
    rows: Buffer
    done: Callable[[], None]

    @property
    def size(self) -> int:
        return self.rows.data.nbytes


@frozen(eq=False)
class Note:
    """A recent prompt on its way there."""

    recent: Recent

    @property
    def size(self) -> int:
        return len(self.recent.rest)

    def done(self) -> None:
        """Nobody waits."""


class Tier(Protocol):
    """Called with the store's lock, which guards the index."""

    @property
    def index(self) -> Index: ...

    def touch(self, entry: Entry) -> None:
        """It was found."""
        ...

    def figures(self) -> Mapping[str, Any]:
        """For /props."""
        ...


class LowerTier(Tier, Protocol):
    """Written behind everybody's back, and there again after a restart."""

    @property
    def recents(self) -> Recents: ...

    @property
    def threads(self) -> tuple[WatchedThread, ...]:
        """Whose troubles /health tells. What they do not do any more costs hits only."""
        ...

    @property
    def damaged(self) -> Mapping[str, int]:
        """Files that were found damaged, by kind."""
        ...

    def close(self) -> bool:
        """Write what is queued. False where that takes too long."""
        ...

    def submit(self, job: Write | Note) -> bool:
        """Taken, or dropped and counted: the queue is bounded."""
        ...

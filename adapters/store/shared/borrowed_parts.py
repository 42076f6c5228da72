"""Parts of a file that show memory which somebody else owns."""

from __future__ import annotations

from collections.abc import Iterable

from adapters.store.files import seekable
from adapters.store.slab_memory import Buffer


class BorrowedParts(list[seekable.Buffer]):
    """Parts of a file, most of which show rows. The rows' buffer is kept as long as these parts are there."""

    def __init__(self, parts: Iterable[seekable.Buffer], owner: Buffer) -> None:
        super().__init__(parts)
        self._owner: Buffer | None = owner

    def give_back(self) -> None:
        """Let go of the parts and of their owner. Called by the last thread that reads them."""
        self.clear()
        self._owner = None

"""Load what earlier processes kept on disk while the server is already ready, and then write changes to disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import anyio
from attrs import define, field

from adapters.http.history.persistent_lru import PersistentLru
from adapters.http.wire.errors import unavailable
from adapters.store.files.private_folder import FolderUnusable, PrivateFolder

log = logging.getLogger("rekindle.http")
MAX_WAIT_S = 10.0  # seconds that a request waits: 12,000 files take 0.5 s on two cores


@define(eq=False)
class HistoryLoader:
    """Loads several stores. stores: by the names of their folders, in `folder`. folder: None: nothing is on disk."""

    stores: Mapping[str, PersistentLru]
    folder: Path | None
    _loaded_event: anyio.Event = field(factory=anyio.Event)
    _is_loaded: bool = False
    _cancelled: threading.Event = field(factory=threading.Event)

    async def run(self) -> None:
        """Load, then follow changes, until this is cancelled. Cancelling waits for at most one file."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._load_and_follow)
                try:
                    await anyio.sleep_forever()
                finally:
                    self._cancelled.set()
        finally:
            self._loaded_event.set()

    async def wait(self) -> None:
        """Wait until everything is loaded, for a request that may refer to it. Raises ApiError 503 if that takes too
        long.
        """
        with anyio.move_on_after(MAX_WAIT_S):
            await self._loaded_event.wait()
        if not self._is_loaded:
            raise unavailable("What was said before is still being read.", 1)

    async def _load_and_follow(self) -> None:
        if self.folder is not None:
            for name, store in self.stores.items():
                await anyio.to_thread.run_sync(self._load_store, self.folder / name, store)
        self._is_loaded = True
        self._loaded_event.set()
        async with anyio.create_task_group() as tasks:
            for store in self.stores.values():
                tasks.start_soon(store.run)

    def _load_store(self, path: Path, store: PersistentLru) -> None:
        """Open and load one store, on a worker thread."""
        try:
            folder = PrivateFolder.open(path)
        except FolderUnusable as error:
            log.warning("%s are not kept on disk: %s", store.description, error)
            return
        store.open_folder(folder)
        try:
            store.load(self._cancelled.is_set)
        except OSError as error:
            log.warning(
                "%s of earlier processes cannot be read, and new ones are not kept: %s", store.description, error
            )
            store.abandon_folder()

"""What earlier processes were told, and have answered: read while a server is ready, and followed on disk then."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import anyio
from attrs import define, field

from adapters.http.history.persistent_lru import PersistentLru
from adapters.http.wire.errors import unavailable
from adapters.store.files.private_folder import Folder, FolderUnusable

log = logging.getLogger("rekindle.http")
PATIENCE_S = 10.0  # of a request that may mean it: 12,000 files take 0.5 s on two cores


@define(eq=False)
class HistoryLoader:
    """cabinets: by the names of their folders, in `folder`. None: nothing is kept, and so nothing read."""

    cabinets: Mapping[str, PersistentLru]
    folder: Path | None
    _ended: anyio.Event = field(factory=anyio.Event)
    _whole: bool = False
    _given_up: threading.Event = field(factory=threading.Event)

    async def run(self) -> None:
        """Until this is cancelled, which keeps nobody waiting for longer than a file takes."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._follow)
                try:
                    await anyio.sleep_forever()
                finally:
                    self._given_up.set()
        finally:
            self._ended.set()

    async def wait(self) -> None:
        """For who may mean something that was said before. Raises ApiError (503) where that takes too long."""
        with anyio.move_on_after(PATIENCE_S):
            await self._ended.wait()
        if not self._whole:
            raise unavailable("What was said before is still being read.", 1)

    async def _follow(self) -> None:
        if self.folder is not None:
            for name, cabinet in self.cabinets.items():
                await anyio.to_thread.run_sync(self._read, self.folder / name, cabinet)
        self._whole = True
        self._ended.set()
        async with anyio.create_task_group() as tasks:
            for cabinet in self.cabinets.values():
                tasks.start_soon(cabinet.run)

    def _read(self, path: Path, cabinet: PersistentLru) -> None:
        """On a thread of its own."""
        try:
            cabinet.folder = folder = Folder.open(path)
        except FolderUnusable as error:
            log.warning("%s are not kept on disk: %s", cabinet.what, error)
            return
        try:
            cabinet.load(self._given_up.is_set)
        except OSError as error:
            log.warning("%s of earlier processes cannot be read, and new ones are not kept: %s", cabinet.what, error)
            cabinet.folder = None
            folder.close()

"""What earlier processes have said, and been told: read while a server is ready, and followed on disk from then on."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import anyio

from adapters.http.cabinet import Cabinet
from adapters.store.folder import Folder, FolderUnusable
from engine.options import Options
from engine.storing import disk_folder

log = logging.getLogger("rekindle")


async def follow(cabinets: Mapping[str, Cabinet], options: Options, recalled: anyio.Event) -> None:
    """Their folders follow them for ever, once they have what is in these."""
    try:
        await recall(cabinets, options)
    finally:
        recalled.set()
    async with anyio.create_task_group() as tasks:
        for cabinet in cabinets.values():
            tasks.start_soon(cabinet.run)


async def recall(cabinets: Mapping[str, Cabinet], options: Options) -> None:
    """What an earlier process kept in them, in folders of the cache's: up to 28,000 files, 0.5 s of them."""
    folder = disk_folder(options)
    if folder is None:
        return
    for name, cabinet in cabinets.items():
        try:
            cabinet.folder = Folder.open(folder / name)
            await anyio.to_thread.run_sync(cabinet.load)
        except (FolderUnusable, OSError) as error:
            log.warning("%s are not kept on disk: %s", cabinet.what, error)

"""A store from its limits: budgets, folder, codec."""

from __future__ import annotations

import threading
from pathlib import Path

from adapters.store.blocks import root
from adapters.store.codec import Chooser, Codec, Mean
from adapters.store.disk import Disk
from adapters.store.folder import Folder, FolderUnusable
from adapters.store.format import Layout
from adapters.store.index import Index
from adapters.store.store import Store


def open_store(
    layout: Layout,
    path: Path | None,
    *,
    host_bytes: int = 0,
    disk_bytes: int = 0,
    codec: Codec = "auto",
    min_tokens: int = 0,
) -> Store | None:
    """None if there is nothing to keep anything in. path: the disk tier's folder. Raises FolderUnusable."""
    if path is None and not host_bytes:
        return None
    lock = threading.RLock()
    disk = None if path is None else open_disk(layout, Folder.open(path), lock, budget=disk_bytes, codec=codec)
    return Store(layout, index(layout, host_bytes), disk, lock, min_tokens)


def open_disk(layout: Layout, folder: Folder, lock: threading.RLock, *, budget: int, codec: Codec = "auto") -> Disk:
    """The folder is the disk's from here on, and closed if it cannot be read."""
    disk = Disk(folder, layout, index(layout, budget), lock, Chooser(codec, Mean()))
    try:
        disk.start()
    except OSError as error:
        folder.close()
        raise FolderUnusable(f"{folder.path}: {error.strerror}") from error
    return disk


def index(layout: Layout, budget: int) -> Index:
    return Index(budget, layout.grain, root(layout.identity, layout.grain))

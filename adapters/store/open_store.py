"""A store from its limits: budgets, folder, codec."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from adapters.store.block_index import Index
from adapters.store.disk_tier import Disk
from adapters.store.files import read_run
from adapters.store.files.codec import DECODERS, Chooser, Codec
from adapters.store.files.file_format import Kind, Layout
from adapters.store.files.private_folder import Folder, FolderUnusable
from adapters.store.host_tier import HostTier
from adapters.store.recent_prompts import MOST_BYTES, Recents
from adapters.store.slab_memory import ALIGN, Memory
from adapters.store.store import AHEAD, RUN_BYTES, Store
from adapters.watched_thread import WatchedThread

GPU_RUN_BYTES = 32 << 20  # a copy of less does not reach the bus's speed
MOVING = 8  # runs that are on their way to or from the device
MOST_PINNED = 8 << 30  # what is on its way from a GPU: 50k tokens of an 8B model, while a disk takes in 1 to 5 GB/s
PINNED_SHARE = 16  # of the machine's memory, that may take the 16th part
QUEUE_SHARE = 8  # of the machine's memory, what waits to be written may take the 8th part
RECENT_SHARE = 16  # of the disk's budget, recent prompts may take the 16th part


def open_store(
    layout: Layout,
    path: Path | None,
    *,
    host_bytes: int = 0,
    disk_bytes: int = 0,
    codec: Codec = "auto",
    memory: Memory | None = None,
) -> Store[Disk] | None:
    """None if there is nothing to keep anything in. Raises FolderUnusable.

    path: the disk tier's folder. memory: as the function of that name makes it.
    """
    if path is None and not host_bytes:
        return None
    pool = held_memory(host_bytes, pin=False) if memory is None else memory
    run_bytes, lock = run_size(pin=pool.pin), threading.RLock()
    if pool.pin:
        pool.slab = slab_size(layout, run_bytes)
    disk = None if path is None else open_disk(layout, Folder.open(path), lock, budget=disk_bytes, codec=codec)
    ready = threading.Event()
    WatchedThread("store-memory", partial(prepare, pool, run_bytes, ready)).start()
    if disk is not None:
        disk.most_queued = max(disk.most_queued, host_bytes, physical() // QUEUE_SHARE)
    return Store(layout, HostTier(index(layout, host_bytes), pool), disk, lock, run_bytes, ready=ready)


def held_memory(host_bytes: int, *, pin: bool, source: Callable[[int], Tensor] | None = None) -> Memory:
    """For what host memory keeps, and what is on its way. pin: a GPU copies from it, so it is page-locked. source: as
    `Memory` has it.
    """
    moving = MOVING * run_size(pin=pin)
    most = host_bytes + (max(moving, min(MOST_PINNED, physical() // PINNED_SHARE)) if pin else moving)
    return Memory(most, pin, source)


def run_size(*, pin: bool) -> int:
    """Bytes of rows that are saved together."""
    return GPU_RUN_BYTES if pin else RUN_BYTES


def slab_size(layout: Layout, run_bytes: int) -> int:
    """Of memory that is registered, as little at once as can be: a run of rows, or some where positional state is
    larger, so that little is left over.
    """
    run, state = max_run(layout, run_bytes), layout.size("state", 0)
    return run * max(1, -(-state // run))


def max_run(layout: Layout, run_bytes: int) -> int:
    """Bytes of the longest run of rows, the target's or its draft's, as `Memory` gives them."""
    kinds: tuple[Kind, ...] = ("rows",) if layout.draft is None else ("rows", "draft")
    blocks = [layout.size(kind, layout.block_size) for kind in kinds]
    most = max(max(1, run_bytes // block) * block for block in blocks)
    return -(-most // ALIGN) * ALIGN


def physical() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def prepare(memory: Memory, run_bytes: int, ready: threading.Event) -> None:
    """What the first restore would have to wait for."""
    try:
        memory.prepare(run_bytes, MOVING)
        read_run.prepare(DECODERS + AHEAD)
    finally:
        ready.set()


def open_disk(layout: Layout, folder: Folder, lock: threading.RLock, *, budget: int, codec: Codec = "auto") -> Disk:
    """The folder is the disk's from here on, and closed if it cannot be read."""
    recents = Recents(most_bytes=min(MOST_BYTES, budget // RECENT_SHARE))
    disk = Disk(folder, layout, index(layout, budget), lock, Chooser(codec), recents)
    try:
        disk.start()
    except OSError as error:
        folder.close()
        raise FolderUnusable(f"{folder.path}: {error.strerror}") from error
    return disk


def index(layout: Layout, budget: int) -> Index:
    return Index(budget, layout.block_size, layout.root("rows"))

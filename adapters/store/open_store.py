"""Opens a store with the limits that it is given: budgets, folder and codec."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path

from attrs import frozen
from torch import Tensor

from adapters.store.block_index import BlockIndex
from adapters.store.disk.disk_tier import MAX_QUEUED_BYTES, DiskTier
from adapters.store.disk_publisher import DiskPublisher
from adapters.store.files import read_run
from adapters.store.files.codec import DECODERS, Codec, CodecChooser
from adapters.store.files.file_format import Kind, Layout
from adapters.store.files.private_folder import FolderUnusable, PrivateFolder
from adapters.store.host_tier import HostTier
from adapters.store.recent_prompts import MAX_BYTES, RecentPrompts
from adapters.store.run_read import BATCH_BYTES
from adapters.store.shared.open_client import open_client
from adapters.store.shared.publish_policy import SharedLimits
from adapters.store.shared.shared_tier import SharedTier
from adapters.store.slab_memory import ALIGN, SlabMemory
from adapters.store.store import RUN_BYTES, RUNS_IN_FLIGHT, Store
from adapters.store.tier import ReadableTier
from adapters.watched_thread import WatchedThread

# A GPU copies less than this at a lower speed than its bus has.
GPU_RUN_BYTES = 32 << 20
MOVING_RUNS = 8  # runs that are on their way to or from the device
MAX_PINNED_BYTES = (
    8 << 30
)  # what is on its way from a GPU: 50k tokens of an 8B model, while a disk takes in 1 to 5 GB/s
PINNED_SHARE = 16  # rows on their way may take a 16th of the machine's memory
QUEUE_SHARE = 8  # rows that wait to be written may take an 8th of the machine's memory
SHARED_QUEUE_SHARE = 16  # what waits to be written to a shared store may take a 16th of the machine's memory
RECENT_SHARE = 16  # recent prompts may take a 16th of the disk's budget


@frozen
class SharedStoreSettings:
    """The URL of the shared tier, and its limits. budget: bytes for one identity, 0 for no limit."""

    url: str
    budget: int = 0
    max_age_s: float = inf


def open_store(
    layout: Layout,
    path: Path | None,
    *,
    host_bytes: int = 0,
    disk_bytes: int = 0,
    codec: Codec = "auto",
    memory: SlabMemory | None = None,
    shared: SharedStoreSettings | None = None,
) -> Store[ReadableTier] | None:
    """Open a store. Return None if there is no tier to keep rows in. Raises FolderUnusable or StoreUnusable.

    path: the disk tier's folder. memory: as `create_memory` makes it. shared: the shared tier.
    """
    if path is None and not host_bytes and shared is None:
        return None
    pool = create_memory(host_bytes, pin=False) if memory is None else memory
    run_bytes = choose_run_bytes(pin=pool.pin)
    lock = threading.RLock()
    others = () if shared is None else (open_shared(layout, shared, lock, codec=codec),)
    if pool.pin:
        pool.slab = choose_slab_bytes(layout, run_bytes)
    try:
        disk = (
            None if path is None else open_disk(layout, PrivateFolder.open(path), lock, budget=disk_bytes, codec=codec)
        )
    except FolderUnusable:
        for tier in others:
            tier.close()
        raise
    ready = threading.Event()
    WatchedThread("store-memory", partial(prepare_memory, pool, run_bytes, ready)).start()
    if disk is not None:
        disk.max_queued_bytes = max(disk.max_queued_bytes, host_bytes, get_physical_memory() // QUEUE_SHARE)
    host = HostTier(create_index(layout, host_bytes), pool)
    # The quickest tier comes first. A further tier is added here.
    tiers = (host, *(() if disk is None else (disk,)), *others)
    upkeep = DiskPublisher(disk, others[0], pool, lock) if disk is not None and others else None
    return Store(layout, tiers, lock, run_bytes, memory_ready=ready, upkeep=upkeep)


def create_memory(host_bytes: int, *, pin: bool, source: Callable[[int], Tensor] | None = None) -> SlabMemory:
    """Return the memory for kept rows and for rows on their way.

    pin: a GPU copies from it, so it is page-locked. source: as in `SlabMemory`.
    """
    moving = count_moving_bytes(choose_run_bytes(pin=pin))
    most = host_bytes + (max(moving, min(MAX_PINNED_BYTES, get_physical_memory() // PINNED_SHARE)) if pin else moving)
    return SlabMemory(most, pin, source)


def count_moving_bytes(run_bytes: int) -> int:
    """Return the bytes of rows that are on their way at once. run_bytes: of the rows that are saved together."""
    return max(MOVING_RUNS * run_bytes, RUNS_IN_FLIGHT * BATCH_BYTES)


def choose_run_bytes(*, pin: bool) -> int:
    """Return the bytes of rows that are saved together."""
    return GPU_RUN_BYTES if pin else RUN_BYTES


def choose_slab_bytes(layout: Layout, run_bytes: int) -> int:
    """Return the bytes of a slab: a run of rows, or some states if recurrent state is larger, so that little is left
    over.
    """
    run = compute_longest_run(layout, run_bytes)
    state = layout.compute_size("state", 0)
    return run * max(1, -(-state // run))


def compute_longest_run(layout: Layout, run_bytes: int) -> int:
    """Return the bytes of the longest run of rows, the target's or its draft's, as `SlabMemory` allocates them."""
    kinds: tuple[Kind, ...] = ("rows",) if layout.draft is None else ("rows", "draft")
    blocks = [layout.compute_size(kind, layout.block_size) for kind in kinds]
    most = max(max(1, run_bytes // block) * block for block in blocks)
    return -(-most // ALIGN) * ALIGN


def get_physical_memory() -> int:
    """Return the bytes of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def prepare_memory(memory: SlabMemory, run_bytes: int, ready: threading.Event) -> None:
    """Prepare memory that the first restore would otherwise have to wait for."""
    try:
        memory.map_buffers(run_bytes, count_moving_bytes(run_bytes) // run_bytes)
        read_run.prepare_scratch(DECODERS + RUNS_IN_FLIGHT)
    finally:
        ready.set()


def open_disk(
    layout: Layout, folder: PrivateFolder, lock: threading.RLock, *, budget: int, codec: Codec = "auto"
) -> DiskTier:
    """Open the disk tier. It owns the folder from here on, and the folder is closed if it cannot be read."""
    recents = RecentPrompts(max_bytes=min(MAX_BYTES, budget // RECENT_SHARE))
    disk = DiskTier(folder, layout, create_index(layout, budget), lock, CodecChooser(codec), recents)
    try:
        disk.start()
    except OSError as error:
        folder.close()
        raise FolderUnusable(f"{folder.path}: {error.strerror}") from error
    return disk


def open_shared(
    layout: Layout, place: SharedStoreSettings, lock: threading.RLock, *, codec: Codec = "zstd"
) -> SharedTier:
    """Open the shared tier. Raises StoreUnusable. `auto` writes zstd: a network is slower than decoding."""
    waiting = max(MAX_QUEUED_BYTES // 4, get_physical_memory() // SHARED_QUEUE_SHARE)
    limits = SharedLimits(waiting, place.budget, place.max_age_s)
    tier = SharedTier(open_client(place.url), layout, lock, limits, CodecChooser(codec, "zstd"))
    tier.start()
    return tier


def create_index(layout: Layout, budget: int) -> BlockIndex:
    return BlockIndex(budget, layout.block_size, layout.compute_root("rows"))

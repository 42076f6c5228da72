"""A small model's rows, and stores around them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import BinaryIO

import anyio
import torch
from aiofiles.threadpool.binary import AsyncBufferedIOBase
from attrs import define, evolve

from adapters.sequence_layout import RowSpec, TensorSpec, torch_dtype
from adapters.store.disk.disk_tier import DiskTier
from adapters.store.files.file_format import DraftLayout, Kind, Layout
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.host_tier import HostTier
from adapters.store.lease import LeasedPart, Miss
from adapters.store.lookup import Lookup, LookupOutcome
from adapters.store.open_store import create_index, open_disk
from adapters.store.slab_memory import Buffer
from adapters.store.store import Store
from adapters.store.tier import read_run
from adapters.transfer.copy_rows import view_tensors
from effects.ids import LeaseId, RequestId, Tokens
from effects.lookup import FindPrefix

BLOCK_SIZE = 4
ROWS = RowSpec(("layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"), 2, 8, "F32")
LAYOUT = Layout("ab" * 16, BLOCK_SIZE, ROWS)
OTHER = Layout("cd" * 16, BLOCK_SIZE, ROWS)
DRAFT = DraftLayout("de" * 16, RowSpec(("draft.layers.0.k", "draft.layers.0.v"), 1, 6, "BF16"))
STATE = (TensorSpec("layers.2.conv", "BF16", (3, 5)), TensorSpec("layers.2.state", "F32", (2, 4, 4)))
FULL = evolve(LAYOUT, draft=DRAFT)  # with a draft's rows
STATEFUL = evolve(LAYOUT, state=STATE)  # a target that needs checkpoints
EVERYTHING = evolve(FULL, state=STATE)
BIG = 1 << 30
WORKERS, LOOP = ThreadPoolExecutor(2), ThreadPoolExecutor(1)


def at_work() -> None:
    """All threads of both pools: they would come whenever the others happen to be busy, and be counted as leaked."""
    met = threading.Barrier(4)
    for pool in (WORKERS, WORKERS, LOOP):
        pool.submit(met.wait)
    met.wait()


def rows_of(tokens: Tokens, start: int = 0, layout: Layout = LAYOUT, kind: Kind = "rows") -> dict[str, torch.Tensor]:
    """Tensors that depend on the position and on all tokens up to there, as KV rows and states do."""
    sums = torch.tensor(tokens, dtype=torch.int64).cumsum(0)[start:] * 31 + torch.arange(start, len(tokens))
    found = dict[str, torch.Tensor]()
    for number, spec in enumerate(layout.get_specs(kind, len(sums))):
        if kind == "state":
            grid = torch.arange(prod(spec.shape)).view(spec.shape) + sums[-1]
        else:
            grid = sums.view(1, -1, 1) * 7 + torch.arange(spec.shape[0] * spec.shape[2]).view(spec.shape[0], 1, -1)
        found[spec.name] = ((grid + number + len(kind)) % 251).to(torch_dtype(spec.dtype))
    return found


def buffer_of(rows: dict[str, torch.Tensor], layout: Layout = LAYOUT, kind: Kind = "rows") -> Buffer:
    """The same, end to end."""
    names = [spec.name for spec in layout.get_specs(kind, 1)]
    return Buffer(torch.cat([rows[name].contiguous().view(-1).view(torch.uint8) for name in names]))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def save(store: Store, tokens: Tokens, kind: Kind = "rows", start: int = 0, salt: str = "") -> None:
    """Save a sequence as the device lane does for a snapshot."""
    for run in store.find_missing_runs(tokens, kind, start, salt):
        rows = rows_of(tokens[: run.stop], run.start, store.layout, kind)
        if not store.keep_run(run, buffer_of(rows, store.layout, kind)):
            break


def checkpoint(store: Store, tokens: Tokens, salt: str = "") -> None:
    if store.lacks_checkpoint(tokens, salt):
        state = rows_of(tokens, 0, store.layout, "state")
        store.keep_checkpoint(tokens, buffer_of(state, store.layout, "state"), salt)


def fetch(store: Store, tokens: Tokens, name: LeaseId) -> int:
    """Read everything that a lease holds, check it against the truth, release it. The tokens."""
    lease = store.get_lease(name)
    try:
        for part in lease.all_parts:
            check_part(store, tokens, part)
    finally:
        store.release(name)
    return lease.length


def check_part(store: Store, tokens: Tokens, part: LeasedPart) -> None:
    entry, layout = part.entry, store.layout
    if part.tier == store.memory_tier.name:
        buffer = store.memory_tier.rows[entry.handle]
    else:
        assert store.lower_tiers
        buffer = LOOP.submit(
            anyio.run, read_run, store.lower_tiers[0], entry, store.memory, WORKERS
        ).result()  # not in a test's own
    rows = dict(view_tensors(layout.get_specs(entry.kind, entry.length), buffer.data))
    if entry.kind != "state":
        first = entry.start
        rows = {name: tensor[:, part.start - first : part.stop - first] for name, tensor in rows.items()}
    assert same(rows, rows_of(tokens[: part.stop], part.start, layout, entry.kind)), "rows of something else"


def disk_store(
    path: Path,
    *,
    layout: Layout = LAYOUT,
    host: int = 0,
    disk: int = BIG,
    folder: Callable[[Path], PrivateFolder] = PrivateFolder.open,
    codec: str = "auto",
) -> Store:
    lock = threading.RLock()
    opened: DiskTier = open_disk(layout, folder(path), lock, budget=disk, codec=codec)  # type: ignore[arg-type]
    return Store(layout, (HostTier(create_index(layout, host)), opened), lock)


def kept(store: Store, tokens: Tokens) -> int:
    """Return how many rows of the sequence are found. All of them are compared with the true ones."""
    found = store.find_prefix((*tokens, 0), 0)
    return 0 if isinstance(found, Miss) else fetch(store, tokens, found[0])


def settled(store: Store, seconds: float = 60) -> None:
    """Until everything is written, and every file looked at."""
    assert store.lower_tiers
    end = time.monotonic() + seconds
    while store.lower_tiers[0].queued_bytes or store.lower_tiers[0].has_unindexed_files:
        assert time.monotonic() < end, "the writer does not come to an end"
        time.sleep(0.001)


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors.zst"))


class Fault(PrivateFolder):
    """Does something else than the Nth system call of the write path: fails, or dies."""

    at = 0
    action: Callable[[], None] = staticmethod(lambda: None)  # type: ignore[assignment]
    calls = 0
    seen: list[str] = []  # noqa: RUF012 - never changed in place

    def point(self, name: str) -> None:
        self.calls += 1
        self.seen = [*self.seen, name]
        if self.calls == self.at:
            self.action()

    def create(self, name: str, flags: int = 0) -> int:
        self.point("create")
        return super().create(name, flags)

    def open_append(self, name: str, flags: int = 0) -> int:
        self.point("open_append")
        return super().open_append(name, flags)

    def append(self, file: BinaryIO, parts: Sequence[bytes]) -> None:
        """Each part torn in the middle."""
        for part in parts:
            half = len(part) // 2
            super().append(file, [part[:half]])
            self.point("append")
            super().append(file, [part[half:]])

    async def append_async(self, file: AsyncBufferedIOBase, parts: Sequence[bytes]) -> None:
        """Each part torn in the middle."""
        for part in parts:
            half = len(part) // 2
            await super().append_async(file, [part[:half]])
            await file.flush()
            self.point("append")
            await super().append_async(file, [part[half:]])

    def sync(self, descriptor: int) -> None:
        self.point("sync")
        super().sync(descriptor)

    def shut(self, file: BinaryIO) -> None:
        super().shut(file)
        self.point("shut")

    def rename(self, old: str, new: str) -> None:
        self.point("rename")
        super().rename(old, new)
        self.point("renamed")

    def sync_folder(self) -> None:
        self.point("sync_folder")
        super().sync_folder()

    def remove(self, name: str) -> None:
        self.point("remove")
        super().remove(name)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@define
class Opening:
    """Opens a folder that misbehaves at its Nth call from `arm` on."""

    action: Callable[[], None]
    folder: Fault | None = None

    def __call__(self, path: Path) -> PrivateFolder:
        self.folder = Fault.open(path)  # type: ignore[assignment] # a class method: it is a Fault
        assert self.folder is not None
        self.folder.action = self.action
        return self.folder

    def arm(self, at: int) -> None:
        assert self.folder is not None
        self.folder.calls, self.folder.at, self.folder.seen = 0, at, []


def looked_up(lookup: Lookup, request: RequestId, effect: FindPrefix) -> LookupOutcome:
    """At once, as prompts that are not long are."""
    found = lookup.find_prefix(request, effect)
    assert isinstance(found, LookupOutcome), found
    return found

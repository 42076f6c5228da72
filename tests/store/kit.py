"""A small model's rows, and stores around them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from attrs import define

from adapters.store.disk import Disk
from adapters.store.folder import Folder
from adapters.store.format import Layout
from adapters.store.opening import index, open_disk
from adapters.store.store import Store
from effects.ids import LeaseId, Tokens

GRAIN = 4
LAYOUT = Layout("ab" * 16, GRAIN, ("layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"), 2, 8, torch.float32)
OTHER = Layout("cd" * 16, GRAIN, LAYOUT.names, 2, 8, torch.float32)
BIG = 1 << 30


def rows_of(tokens: Tokens, start: int = 0, layout: Layout = LAYOUT) -> dict[str, torch.Tensor]:
    """Rows that depend on the position and on all tokens up to there, as KV rows do."""
    sums = torch.tensor(tokens, dtype=torch.int64).cumsum(0)[start:] * 31 + torch.arange(start, len(tokens))
    shape = (layout.heads, len(sums), layout.width)
    grid = torch.arange(layout.heads * layout.width).view(layout.heads, 1, layout.width)
    return {
        name: ((sums.view(1, -1, 1) * 7 + grid + number) % 1009).to(layout.dtype).expand(shape).contiguous()
        for number, name in enumerate(layout.names)
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def save(store: Store, tokens: Tokens) -> None:
    """What the device lane does with a snapshot."""
    for start, stop in store.gaps(tokens):
        if not store.keep(tokens[:stop], start, rows_of(tokens[:stop], start, store.layout)):
            break


async def fetch(store: Store, tokens: Tokens, name: LeaseId) -> int:
    """Read everything that a lease holds, check it against the truth, release it. The tokens."""
    lease = store.lease(name)
    try:
        for part in lease.parts:
            if part.place == "host":
                rows = store.rows[part.entry.handle]
            else:
                assert store.disk is not None
                rows = store.layout.views(await store.disk.read(part.entry), part.entry.length)
            first = part.entry.start
            piece = {name: tensor[:, part.start - first : part.stop - first] for name, tensor in rows.items()}
            assert same(piece, rows_of(tokens[: part.stop], part.start, store.layout)), "rows of something else"
    finally:
        store.release(name)
    return lease.length


def disk_store(
    path: Path,
    *,
    layout: Layout = LAYOUT,
    host: int = 0,
    disk: int = BIG,
    folder: Callable[[Path], Folder] = Folder.open,
    codec: str = "auto",
) -> Store:
    lock = threading.RLock()
    opened: Disk = open_disk(layout, folder(path), lock, budget=disk, codec=codec)  # type: ignore[arg-type]
    return Store(layout, index(layout, host), opened, lock)


def settled(store: Store, seconds: float = 10) -> None:
    """Until everything is written, and every file looked at."""
    assert store.disk is not None
    end = time.monotonic() + seconds
    while store.disk.queued or store.disk.scanning:
        assert time.monotonic() < end, "the writer does not come to an end"
        time.sleep(0.001)


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors.zst"))


class Fault(Folder):
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

    def create(self, name: str) -> int:
        self.point("create")
        return super().create(name)

    def open_append(self, name: str) -> int:
        self.point("open_append")
        return super().open_append(name)

    def append(self, descriptor: int, data: bytes) -> int:
        """Torn in the middle."""
        half = len(data) // 2
        super().append(descriptor, data[:half])
        self.point("append")
        return half + super().append(descriptor, data[half:])

    def sync(self, descriptor: int) -> None:
        self.point("sync")
        super().sync(descriptor)

    def shut(self, descriptor: int) -> None:
        super().shut(descriptor)
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

    def __call__(self, path: Path) -> Folder:
        self.folder = Fault.open(path)  # type: ignore[assignment] # a class method: it is a Fault
        assert self.folder is not None
        self.folder.action = self.action
        return self.folder

    def arm(self, at: int) -> None:
        assert self.folder is not None
        self.folder.calls, self.folder.at, self.folder.seen = 0, at, []

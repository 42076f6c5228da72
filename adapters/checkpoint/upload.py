"""Tensors from the page cache to a device, ahead of whoever asks for them: several threads read pieces into a few
buffers, which a GPU copies from while others are read. So no tensor is ever whole in host memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock, local
from typing import TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.finite_check import check_finite
from adapters.checkpoint.packed_matrix import PackedMatrix, PackedSource, StepLayout
from adapters.checkpoint.safetensors_folder import FLOATS, Fetch, StoredTensor, TensorEntry

T = TypeVar("T")
StateCheckpoint = tuple[Path, int, int]  # bytes of a file

PIECE = 16 << 20  # bytes that are read at once: a copy of less does not reach the bus's speed
READERS = 8  # threads: one alone reads a third of what the bus carries
ALIGN = 512  # bytes of the device that torch takes for a tensor are so many times as many
SMALL = 1 << 20  # bytes of a tensor that torch has memory of another kind for
AHEAD = 1 << 30  # bytes of tensors that are on their way before they are asked for: two layers of a large model


@frozen(eq=False)
class Staging:
    """What one thread's pieces pass through. stream: of a GPU, and the thread's current one: of its own, so that
    threads do not wait for each other.
    """

    buffer: Tensor
    stream: torch.cuda.Stream | None

    def pass_on(self, descriptor: int, at: int, target: Tensor, after: torch.cuda.Event | None) -> bool:
        """So many bytes of a file from `at` on, into all of `target`. after: once it may be written. False if the file
        has fewer.
        """
        staged, done = self.buffer[: len(target)], 0
        view = staged.numpy().data
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], at + done)
            if not count:
                return False
            done += count
        with torch.inference_mode():
            if self.stream is not None and after is not None:
                self.stream.wait_event(after)
            target.copy_(staged, non_blocking=True)
            if self.stream is not None:
                self.stream.synchronize()
        return True


@frozen(eq=False)
class Landing:
    """A tensor on the device, and the pieces of it that are still on their way."""

    tensor: Tensor
    pieces: tuple[Future[bool], ...]


def place_of(entry: TensorEntry) -> StateCheckpoint:
    return entry.file, entry.start, entry.stop


@define(eq=False)
class Upload:
    """The tensors `names` of a checkpoint, in about the order in which they will be asked for; a `PackedSource`.
    Packed ones are unpacked, or put together anew, on the device. What has to be made on the host, or finds no room
    there until it is made, is read by `source`.

    buffer: called by each of the threads, which number `readers`, for what its pieces pass through: uint8 `[piece]` on
    the host, pinned for a GPU. heard: called after each tensor. served: the type that weights are going to have.
    """

    source: PackedSource
    tensors: Mapping[str, StoredTensor]
    names: Iterable[str]
    device: torch.device
    buffer: Callable[[], Tensor]
    heard: Callable[[], object] = lambda: None
    served: torch.dtype | None = None
    ahead: int = AHEAD
    piece: int = PIECE
    readers: int = READERS
    _coming: deque[TensorEntry] = field(init=False)
    _begun: dict[StateCheckpoint, Landing] = field(factory=dict[StateCheckpoint, Landing])
    _bytes: int = 0  # of what has begun
    _own: local = field(factory=local)  # of each thread
    _files: dict[Path, int] = field(factory=dict[Path, int])
    _pool: ThreadPoolExecutor = field(init=False)
    _lock: Lock = field(factory=Lock)  # of what has begun and what has not

    def __attrs_post_init__(self) -> None:
        known = (self.tensors[name] for name in self.names if name in self.tensors)
        self._coming = deque(source for one in known for source in one.sources)
        self._pool = ThreadPoolExecutor(self.readers, "weights")

    def begin(self) -> None:
        """What comes first is on its way before anybody asks for anything. Some hundred tensors take a while to begin,
        so that is done by one of the threads.
        """
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        self._pool.submit(self._fill_on, stream, torch.is_inference_mode_enabled())

    def read(self, name: str) -> Tensor:
        """On the device, if it can be. Raises CheckpointError, torch.OutOfMemoryError, or MemoryError for a buffer."""
        entry = self.tensors.get(name)
        if entry is None or not entry.sources:
            return self.source.read(name)
        return self._made(partial(entry.read, name), partial(self.source.read, name), entry)

    def layout(self, name: str) -> StepLayout | None:
        entry = self.tensors.get(name)
        return None if entry is None else entry.layout

    def packed(self, name: str) -> PackedMatrix:
        """The same of a tensor that has a layout."""
        entry = self.tensors[name]
        if not entry.sources:
            return self.source.packed(name)
        return self._made(partial(entry.packed, name), partial(self.source.packed, name), entry)

    def _made(self, here: Callable[[Fetch], T], there: Callable[[], T], entry: StoredTensor) -> T:
        """there: on the host, where what is in between finds room."""
        try:
            found = here(self._fetched)
        except torch.OutOfMemoryError:
            if isinstance(entry, TensorEntry):
                raise
            return there()
        self.heard()
        return found

    def _fetched(self, entry: TensorEntry, name: str) -> Tensor:
        with self._lock:
            self._fill()
            if place_of(entry) not in self._begun:  # it is not one of those that were named, or it is read once more
                self._begin(entry)
            landing = self._begun.pop(place_of(entry))
        try:
            whole = all(piece.result() for piece in landing.pieces)
        except OSError as error:
            raise CheckpointError(f"{entry.file}: cannot be read: {error.strerror}") from None
        if not whole:
            raise CheckpointError(f"{entry.file}: truncated: {name} ends past the end of the file")
        tensor = landing.tensor.view(entry.dtype).view(entry.shape)
        if entry.dtype in FLOATS.values():
            check_finite(tensor, entry.file, name)
        with self._lock:
            self._bytes -= entry.nbytes
            self._fill()
        return tensor

    def close(self) -> None:
        """Nobody reads any more."""
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._begun.clear()

    def _fill_on(self, stream: torch.cuda.Stream | None, inference: bool) -> None:
        """As whoever asked for it would: memory belongs to the stream that it was taken on. Where all of it comes at
        once, it is asked of the device in one piece, which torch then cuts up: hundreds would keep others waiting. That
        piece stays as long as anything in it, so not where tensors become others.
        """
        with self._lock, torch.inference_mode(inference), torch.cuda.stream(stream):
            whole = sum(-(-entry.nbytes // ALIGN) * ALIGN for entry in self._coming)
            large = {entry.dtype for entry in self._coming if entry.nbytes > SMALL}
            if whole <= self.ahead and large == {self.served}:
                torch.empty(whole, dtype=torch.uint8, device=self.device)
            self._fill()

    def _fill(self) -> None:
        """Behind the lock."""
        while self._coming and self._bytes < self.ahead:
            self._begin(self._coming.popleft())

    def _begin(self, entry: TensorEntry) -> None:
        tensor = torch.empty(entry.nbytes, dtype=torch.uint8, device=self.device)
        after = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        descriptor, size = self._opened(entry.file), self.piece
        spans = [(entry.start + at, tensor[at : at + size]) for at in range(0, entry.nbytes, size)]
        pieces = [self._pool.submit(self._move, descriptor, at, part, after) for at, part in spans]
        self._begun[place_of(entry)] = Landing(tensor, tuple(pieces))
        self._bytes += entry.nbytes

    def _move(self, descriptor: int, at: int, target: Tensor, after: torch.cuda.Event | None) -> bool:
        return self._staging().pass_on(descriptor, at, target, after)

    def _staging(self) -> Staging:
        """This thread's own. Its stream is chosen once: for each of a thousand pieces that takes as long as the rest of
        what they need of an interpreter which others wait for.
        """
        found: Staging | None = getattr(self._own, "staging", None)
        if found is None:
            stream = None
            if self.device.type == "cuda":
                stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
                torch.cuda.set_stream(stream)
            found = self._own.staging = Staging(self.buffer(), stream)
        return found

    def _opened(self, file: Path) -> int:
        if file not in self._files:
            try:
                self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
        return self._files[file]

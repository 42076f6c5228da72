"""Uploads tensors from files to a device before they are asked for.

Several threads read pieces of files into a few host buffers. A GPU copies from one buffer while another one is filled.
So no tensor is ever whole in host memory. Tensors are started in order, up to a limit of bytes that are pending.
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
FileRange = tuple[Path, int, int]  # a file, and the first and last byte (exclusive) in it

PIECE_BYTES = 16 << 20  # read at once; copies of less do not reach the speed of the bus
READERS = 8  # threads; one alone reads a third of what the bus can carry
ALIGNMENT = 512  # torch rounds the device memory of a tensor up to a multiple of this, in bytes
SMALL_BYTES = 1 << 20  # torch takes tensors up to this size from a separate pool
# Bytes of tensors that are started before they are asked for: two layers of a large model.
MAX_PENDING_BYTES = 1 << 30


@frozen(eq=False)
class Staging:
    """The host buffer and the stream of one reader thread.

    stream: the thread's own and current CUDA stream, so that threads do not wait for each other. None: no GPU.
    """

    buffer: Tensor
    stream: torch.cuda.Stream | None

    def copy_piece(self, descriptor: int, at: int, target: Tensor, after: torch.cuda.Event | None) -> bool:
        """Copy the bytes of a file from `at` on to all of `target`. Return False if the file is too short.

        after: `target` may be written once this event has happened.
        """
        staged = self.buffer[: len(target)]
        done = 0
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
class PendingTensor:
    """A tensor on the device, and its pieces, some of which may not have been copied yet."""

    tensor: Tensor
    pieces: tuple[Future[bool], ...]


def file_range(entry: TensorEntry) -> FileRange:
    return entry.file, entry.start, entry.stop


@define(eq=False)
class Upload:
    """A `PackedSource` that uploads the tensors `names` in about the order in which they will be asked for.

    Packed tensors are unpacked or rearranged on the device. Two kinds of tensors are read by `source` instead: those
    that must be made on the host, and those for which the device lacks memory while they are made.

    new_buffer: called once by each of the `readers` threads. It returns a host buffer, uint8 `[piece_bytes]`, pinned
    for a GPU.
    on_tensor_read: called after each tensor.
    served_dtype: the dtype that weights will have when they are served.
    max_pending_bytes: tensors are started ahead up to this many bytes.
    """

    source: PackedSource
    tensors: Mapping[str, StoredTensor]
    names: Iterable[str]
    device: torch.device
    new_buffer: Callable[[], Tensor]
    on_tensor_read: Callable[[], object] = lambda: None
    served_dtype: torch.dtype | None = None
    max_pending_bytes: int = MAX_PENDING_BYTES
    piece_bytes: int = PIECE_BYTES
    readers: int = READERS
    _queued: deque[TensorEntry] = field(init=False)
    _pending: dict[FileRange, PendingTensor] = field(factory=dict[FileRange, PendingTensor])
    _pending_bytes: int = 0
    _thread_local: local = field(factory=local)
    _files: dict[Path, int] = field(factory=dict[Path, int])
    _pool: ThreadPoolExecutor = field(init=False)
    _lock: Lock = field(factory=Lock)  # guards what is queued and what is pending

    def __attrs_post_init__(self) -> None:
        known = (self.tensors[name] for name in self.names if name in self.tensors)
        self._queued = deque(source for tensor in known for source in tensor.sources)
        self._pool = ThreadPoolExecutor(self.readers, "weights")

    def start(self) -> None:
        """Start to upload the first tensors. A reader thread does this, since starting some hundred takes a while."""
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        self._pool.submit(self._start_first, stream, torch.is_inference_mode_enabled())

    def read(self, name: str) -> Tensor:
        """Return a tensor, on the device if possible.

        Raises CheckpointError, torch.OutOfMemoryError, or MemoryError where there is no memory for a buffer.
        """
        entry = self.tensors.get(name)
        if entry is None or not entry.sources:
            return self.source.read(name)
        return self._read_with_fallback(partial(entry.read, name), partial(self.source.read, name), entry)

    def find_layout(self, name: str) -> StepLayout | None:
        return self.source.find_layout(name) if name in self.tensors else None

    def read_packed(self, name: str) -> PackedMatrix:
        """Return a tensor that has a layout, packed. Raises the same errors as `read`."""
        entry = self.tensors[name]
        if not entry.sources:
            return self.source.read_packed(name)
        return self._read_with_fallback(partial(entry.read_packed, name), partial(self.source.read_packed, name), entry)

    def _read_with_fallback(
        self, read_on_device: Callable[[Fetch], T], read_on_host: Callable[[], T], entry: StoredTensor
    ) -> T:
        """Make a tensor on the device, or on the host if the device lacks the memory."""
        try:
            found = read_on_device(self._fetch)
        except torch.OutOfMemoryError:
            if isinstance(entry, TensorEntry):
                raise
            return read_on_host()
        self.on_tensor_read()
        return found

    def _fetch(self, entry: TensorEntry, name: str) -> Tensor:
        """Return a stored tensor on the device. Waits for its pieces. Raises CheckpointError."""
        with self._lock:
            self._start_next()
            if file_range(entry) not in self._pending:  # it was not named, or it is read a second time
                self._start_tensor(entry)
            landing = self._pending.pop(file_range(entry))
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
            self._pending_bytes -= entry.nbytes
            self._start_next()
        return tensor

    def close(self) -> None:
        """End the reader threads and close the files. Nothing may be read afterwards."""
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._pending.clear()

    def _start_first(self, stream: torch.cuda.Stream | None, inference: bool) -> None:
        """Start the first tensors, on the stream and in the mode of the thread that called `start`.

        Device memory belongs to the stream on which it was taken. If all tensors fit into the limit, their memory is
        first taken as one block and given back, and torch then divides it. Hundreds of allocations would keep other
        threads waiting. The block stays until all tensors in it are gone. So this is done only if tensors keep their
        dtype.
        """
        with self._lock, torch.inference_mode(inference), torch.cuda.stream(stream):
            whole = sum(-(-entry.nbytes // ALIGNMENT) * ALIGNMENT for entry in self._queued)
            large = {entry.dtype for entry in self._queued if entry.nbytes > SMALL_BYTES}
            if whole <= self.max_pending_bytes and large == {self.served_dtype}:
                torch.empty(whole, dtype=torch.uint8, device=self.device)
            self._start_next()

    def _start_next(self) -> None:
        """Start queued tensors up to the limit. The caller holds the lock."""
        while self._queued and self._pending_bytes < self.max_pending_bytes:
            self._start_tensor(self._queued.popleft())

    def _start_tensor(self, entry: TensorEntry) -> None:
        """Allocate a tensor on the device and submit its pieces to the threads. The caller holds the lock."""
        tensor = torch.empty(entry.nbytes, dtype=torch.uint8, device=self.device)
        after = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        descriptor = self._open_file(entry.file)
        size = self.piece_bytes
        spans = [(entry.start + at, tensor[at : at + size]) for at in range(0, entry.nbytes, size)]
        pieces = [self._pool.submit(self._move, descriptor, at, part, after) for at, part in spans]
        self._pending[file_range(entry)] = PendingTensor(tensor, tuple(pieces))
        self._pending_bytes += entry.nbytes

    def _move(self, descriptor: int, at: int, target: Tensor, after: torch.cuda.Event | None) -> bool:
        return self._staging().copy_piece(descriptor, at, target, after)

    def _staging(self) -> Staging:
        """Return the buffer and stream of this thread.

        The stream is set once per thread. To set it for each of a thousand pieces would double the time for which the
        pieces hold the GIL.
        """
        found: Staging | None = getattr(self._thread_local, "staging", None)
        if found is None:
            stream = None
            if self.device.type == "cuda":
                stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
                torch.cuda.set_stream(stream)
            found = self._thread_local.staging = Staging(self.new_buffer(), stream)
        return found

    def _open_file(self, file: Path) -> int:
        if file not in self._files:
            try:
                self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
        return self._files[file]

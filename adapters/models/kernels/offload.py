"""Weights that can leave their device and come back: offloaded to pinned host memory, or released and read again.

A move is a transaction: it completes, or the previous state is still there.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import attrs
import torch
from torch import Tensor

from adapters.process_memory import advise, map_memory, trim_heap

log = logging.getLogger("rekindle.models")

T = TypeVar("T")
State: TypeAlias = Literal["loaded", "parked", "released"]

_ALIGNED = 256


class OffloadableWeights(Generic[T]):
    """A tree of weights (tensors in attrs classes, tuples and lists), or the knowledge of where to get it from.

    load: makes the tree on `device`. On CUDA the first `offload` copies it to the host. That copy is kept while the
    weights are on the device again, because weights do not change, so a later `offload` copies nothing. On a CPU
    `offload` gives the memory back to the system and `load_back` loads anew. The tree is released at the start.
    """

    def __init__(self, load: Callable[[], T], device: torch.device) -> None:
        self._load = load
        self._device = device
        self._loaded: T | None = None
        self._host: T | None = None
        self._bytes = self._host_bytes = 0  # computed when they change, because every request reads them
        self._released = True

    @property
    def loaded(self) -> T | None:
        return self._loaded

    @property
    def state(self) -> State:
        if self._loaded is not None:
            return "loaded"
        return "released" if self._released else "parked"

    @property
    def weights_bytes(self) -> int:
        """Bytes on the device."""
        return self._bytes

    @property
    def host_bytes(self) -> int:
        """Bytes on the host."""
        return self._host_bytes

    def offload(self) -> int:
        """Give the device's memory back and return its bytes. After an error the weights are still loaded. No kernel
        that runs may use the weights.
        """
        if self._loaded is None:
            return 0
        given = self.weights_bytes
        if self._device.type == "cuda" and self._host is None:
            self._host_bytes, self._host = copy_to_host(self._loaded)
            torch.cuda.synchronize(self._device)
        self._loaded = None
        self._bytes = 0
        self._released = False
        release_unused(self._device)
        return given

    def load_back(self) -> int:
        """Bring the weights back and return their bytes; after an error nothing has changed. Raises
        torch.OutOfMemoryError where there is no room.
        """
        if self._loaded is not None:
            return 0
        try:
            loaded = self._load() if self._host is None else self._from_host(self._host)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
                raise torch.OutOfMemoryError(f"no memory for the weights: {error}") from error
            raise
        self._loaded = loaded
        self._bytes = count_bytes(loaded)
        self._released = False
        return self._bytes

    def _from_host(self, host: T) -> T:
        loaded = copy_tree(host, lambda size: torch.empty(size, dtype=torch.uint8, device=self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return loaded

    def release(self) -> None:
        """Give back the host's copy as well."""
        self._loaded = None
        self._host = None
        self._bytes = 0
        self._host_bytes = 0
        self._released = True
        release_unused(self._device)


def list_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor in attrs classes, tuples and lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from list_tensors(part)
    elif attrs.has(kind := type(tree)):
        for field in attrs.fields(kind):
            yield from list_tensors(getattr(tree, field.name))


def count_bytes(tree: Any) -> int:
    """Return the bytes of all tensors. Memory that several tensors share counts once."""
    storages: dict[int, int] = {}
    opaque = 0
    for tensor in list_tensors(tree):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:
            opaque += tensor.nbytes
    return opaque + sum(storages.values())


def copy_tree(tree: Any, allocate: Callable[[int], Tensor]) -> Any:
    """Return the same tree over copies of its memory. Tensors that shared memory still do.

    allocate: returns a uint8 tensor of this many bytes where the copy shall be, aligned for every dtype. The copies are
    asynchronous.
    """
    copies: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        copy = copies.get(storage.data_ptr())
        if copy is None:
            copy = copies[storage.data_ptr()] = allocate(storage.nbytes())
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            copy.copy_(source, non_blocking=True)
        typed = copy.view(tensor.dtype)
        return typed.as_strided(tensor.size(), tensor.stride(), typed.storage_offset() + tensor.storage_offset())

    return map_tensors(tree, move)


def map_tensors(tree: Any, move: Callable[[Tensor], Any]) -> Any:
    """Return the tree with every tensor replaced by the result of `move`."""
    if isinstance(tree, Tensor):
        return move(tree)
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(part, move) for part in tree)
    if attrs.has(type(tree)):
        parts = {field.alias: map_tensors(getattr(tree, field.name), move) for field in attrs.fields(type(tree))}
        return type(tree)(**parts)
    return tree


def copy_to_host(tree: T) -> tuple[int, T]:
    """Copy the tree into one run of pinned memory; return its bytes and the copy. The copies are still under way."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in list_tensors(tree)}
    total = sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes.values())
    memory = allocate_pinned(total)
    at = 0

    def allocate(size: int) -> Tensor:
        nonlocal at
        start = at
        at = at + -(-size // _ALIGNED) * _ALIGNED
        return memory[start : start + size]

    return total, copy_tree(tree, allocate)


class PinnedMap(mmap.mmap):
    """Private memory of exactly the size asked for, registered with CUDA until it is no longer referenced.

    Torch's pinned allocator rounds up to powers of two and keeps what it has. A forked process does not get this
    memory: its pages would be copied, and CUDA might continue with pages that this process no longer has.
    """

    address = 0

    def register(self, address: int) -> None:
        """Register the memory with CUDA. Raises torch.cuda.CudaError if CUDA cannot pin it."""
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))  # type: ignore[no-untyped-call]
        self.address = address

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]


def allocate_pinned(size: int, *, aside: bool = False) -> Tensor:
    """Return a uint8 tensor `[size]`, pinned where CUDA is available. It is freed with the last tensor on it. Raises
    MemoryError.

    All pages exist before CUDA registers them: CUDA blocks every other call for as long as it makes pages. aside:
    only this thread makes them, which takes longer but leaves the processors to others.
    """
    memory = map_memory(size, PinnedMap)
    advise(memory, "MADV_DONTFORK")
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if torch.cuda.is_available():
        if aside:
            ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)
        else:
            tensor.fill_(0)
        try:
            memory.register(tensor.data_ptr())
        except torch.cuda.CudaError as error:
            log.warning("host memory could not be pinned, so copies to the device are slower: %s", error)
    return tensor[:size]


def release_unused(device: torch.device) -> None:
    """Return memory that is not used to the device or the system, rather than keep it for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim_heap()

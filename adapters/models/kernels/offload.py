"""Weights that can leave their device and come back: parked in pinned host memory, or released and read again.

A change of place is a transaction: it completes, or the previous state is still there.
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

from adapters.process_memory import advise, mapped, trim

log = logging.getLogger("rekindle.models")

T = TypeVar("T")
State: TypeAlias = Literal["loaded", "parked", "released"]

_ALIGNED = 256


class ParkedWeights(Generic[T]):
    """Holds a tree of weights (tensors in attrs classes, tuples and lists) or knows where to get it from.

    load: makes the tree on `device`. On CUDA the first parking copies it to the host; the copy is kept while the
    weights are loaded again, since they do not change, so parking once more costs nothing. On CPU parking gives the
    memory back to the system and unparking loads anew. Starts out released.
    """

    def __init__(self, load: Callable[[], T], device: torch.device) -> None:
        self._load, self._device = load, device
        self._loaded: T | None = None
        self._host: T | None = None
        self._bytes = self._host_bytes = 0  # counted when they change: every request asks
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
        """On the device."""
        return self._bytes

    @property
    def host_bytes(self) -> int:
        """On the host."""
        return self._host_bytes

    def park(self) -> int:
        """Returns the bytes given back; on a failure the weights stay loaded. Nothing of the device may use them."""
        if self._loaded is None:
            return 0
        given = self.weights_bytes
        if self._device.type == "cuda" and self._host is None:
            self._host_bytes, self._host = kept_on_host(self._loaded)
            torch.cuda.synchronize(self._device)
        self._loaded, self._bytes, self._released = None, 0, False
        give_back(self._device)
        return given

    def unpark(self) -> int:
        """Returns the bytes brought back; on a failure nothing has changed. torch.OutOfMemoryError: no room."""
        if self._loaded is not None:
            return 0
        try:
            loaded = self._load() if self._host is None else self._from_host(self._host)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
                raise torch.OutOfMemoryError(f"no memory for the weights: {error}") from error
            raise
        self._loaded, self._bytes, self._released = loaded, size_of(loaded), False
        return self._bytes

    def _from_host(self, host: T) -> T:
        loaded = relocated(host, lambda size: torch.empty(size, dtype=torch.uint8, device=self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return loaded

    def release(self) -> None:
        """Give back the host's copy too."""
        self._loaded, self._host, self._bytes, self._host_bytes, self._released = None, None, 0, 0, True
        give_back(self._device)


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Every tensor in attrs classes, tuples and lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from tensors_of(part)
    elif attrs.has(kind := type(tree)):
        for field in attrs.fields(kind):
            yield from tensors_of(getattr(tree, field.name))


def size_of(tree: Any) -> int:
    """Bytes of all tensors; memory that several share counts once."""
    storages: dict[int, int] = {}
    opaque = 0
    for tensor in tensors_of(tree):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:
            opaque += tensor.nbytes
    return opaque + sum(storages.values())


def relocated(tree: Any, place: Callable[[int], Tensor]) -> Any:
    """The same tree over copies of its memory; what shared memory still does.

    place(bytes) gives a uint8 tensor wherever the copy shall be, aligned for every dtype. Copies do not wait.
    """
    copies: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        copy = copies.get(storage.data_ptr())
        if copy is None:
            copy = copies[storage.data_ptr()] = place(storage.nbytes())
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            copy.copy_(source, non_blocking=True)
        typed = copy.view(tensor.dtype)
        return typed.as_strided(tensor.size(), tensor.stride(), typed.storage_offset() + tensor.storage_offset())

    return rebuilt(tree, move)


def rebuilt(tree: Any, move: Callable[[Tensor], Any]) -> Any:
    """The tree with every tensor replaced by what `move` makes of it."""
    if isinstance(tree, Tensor):
        return move(tree)
    if isinstance(tree, tuple | list):
        return type(tree)(rebuilt(part, move) for part in tree)
    if attrs.has(type(tree)):
        parts = {field.alias: rebuilt(getattr(tree, field.name), move) for field in attrs.fields(type(tree))}
        return type(tree)(**parts)
    return tree


def kept_on_host(tree: T) -> tuple[int, T]:
    """A copy of the tree in one run of pinned memory, and its bytes. The copies are still under way."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_of(tree)}
    total = sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes.values())
    memory, at = pinned(total), 0

    def place(size: int) -> Tensor:
        nonlocal at
        start, at = at, at + -(-size // _ALIGNED) * _ALIGNED
        return memory[start : start + size]

    return total, relocated(tree, place)


class PinnedMap(mmap.mmap):
    """Private memory of exactly the size asked for (torch's pinned allocator rounds up to powers of two and keeps
    what it has), registered with CUDA until nobody refers to it any more. No process that is forked has it: a copy
    of its pages would be made, and CUDA might go on with the ones that this process has no longer.
    """

    address = 0

    def register(self, address: int) -> None:
        """Raises torch.cuda.CudaError if CUDA cannot pin it."""
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))  # type: ignore[no-untyped-call]
        self.address = address

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]


def pinned(size: int, *, aside: bool = False) -> Tensor:
    """A uint8 tensor `[size]`, pinned where CUDA can; gone with the last tensor on it. Raises MemoryError.

    Its pages are there before CUDA is asked, which keeps everybody else's calls waiting for as long as that takes.
    aside: this thread makes them alone, which takes longer, and others have the processors meanwhile.
    """
    memory = mapped(size, PinnedMap)
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
            log.warning("host memory that is not pinned is copied from more slowly: %s", error)
    return tensor[:size]


def give_back(device: torch.device) -> None:
    """Return what nobody uses to the device or the system, rather than keep it for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim()

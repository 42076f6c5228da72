"""The tensors of a checkpoint's folder: safetensors, one file or several with an index. Nothing is ever unpickled.

Headers are read by hand: their offsets tell where the bytes are that identify the weights, a file that shrinks under
us is an error and not a crash, as it would be with a map of it, and nothing in them is allocated before it is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters import bounded_json
from adapters.checkpoint.checkpoint_error import CheckpointError, shown
from adapters.checkpoint.config_fields import open_regular, read_json
from adapters.checkpoint.finite_check import check_finite
from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout
from adapters.checkpoint.weights_digest import MAX_HEADER, digest_of_files

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# What packed matrices are made of besides; nobody but their packing knows what these numbers stand for.
PACKED = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
ALL = {**FLOATS, **PACKED}
_MAX_PARTS = 1 << 18  # lists and objects in it: three for each tensor
_MAX_RANK = 8

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by their published names
Fetch = Callable[["TensorEntry", str], Tensor]  # what lies there, called so if that fails


class StoredTensor(Protocol):
    """One tensor of a checkpoint, in whatever format, of which nobody else has to know.

    What files hold as it is may be fetched to a device: what is made of it is made there, with the same bits.
    """

    @property
    def files(self) -> Mapping[Path, int]:
        """Those that it lies in, and of each how many bytes come first, before all tensors."""
        ...

    @property
    def form(self) -> str:
        """How it is packed; empty where it is not. Other numbers from the same bytes are another form."""
        ...

    @property
    def nbytes(self) -> int:
        """What it takes in its form."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What is read."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        """What is fetched for it; none where it has to be made on the host."""
        ...

    def read(self, name: str, fetch: Fetch = ...) -> Tensor:
        """The tensor, on the host or where it was fetched; called `name` if that fails. Raises CheckpointError."""
        ...

    @property
    def layout(self) -> StepLayout | None:
        """As it can be multiplied with, where that is not unpacked."""
        ...

    def packed(self, name: str, fetch: Fetch = ...) -> PackedMatrix:
        """Of a tensor that has a layout. Raises CheckpointError."""
        ...

    def rounded(self, dtype: torch.dtype) -> StoredTensor:
        """The same, to be read in `dtype`, if it is stored in a form that has to be read in one of torch's."""
        ...


@frozen
class TensorEntry:
    """Where one tensor lies: bytes `[start, stop)` of `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    header: int

    @property
    def files(self) -> Mapping[Path, int]:
        return {self.file: self.header}

    @property
    def form(self) -> str:
        return ""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        return (self,)

    def read(self, name: str, fetch: Fetch | None = None) -> Tensor:
        """The tensor, as stored, on the host or fetched; it is called `name` if that fails."""
        if fetch is not None:
            return fetch(self, name)
        data = read_bytes(self.file, self.start, self.stop, name)
        tensor = torch.frombuffer(data, dtype=self.dtype).view(self.shape) if data else torch.empty(self.shape)
        if self.dtype in FLOATS.values():
            check_finite(tensor, self.file, name)
        return tensor

    @property
    def layout(self) -> None:
        return None

    def packed(self, name: str, fetch: Fetch | None = None) -> PackedMatrix:  # noqa: ARG002
        raise AssertionError(f"{name} is not packed")

    def rows(self, first: int, count: int) -> TensorEntry:
        """So many of its rows, those of all matrices of a stack counted through."""
        width = self.shape[-1]
        start = self.start + first * width * self.dtype.itemsize
        return evolve(self, shape=(count, width), start=start, stop=start + count * width * self.dtype.itemsize)

    def rounded(self, dtype: torch.dtype) -> TensorEntry:  # noqa: ARG002 - it is read as stored
        return self


def kind_of(dtype: torch.dtype) -> str:
    """As files call it."""
    return next(kind for kind, one in ALL.items() if one == dtype)


def read_bytes(path: Path, start: int, stop: int, name: str) -> bytearray:
    """Bytes `[start, stop)` of a file, which belong to the tensor `name`. Raises CheckpointError."""
    data = bytearray(stop - start)
    try:
        with path.open("rb") as file:
            file.seek(start)
            count = file.readinto(data)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if count != len(data):
        raise CheckpointError(f"{path}: truncated: {name} ends past the end of the file")
    return data


def digest_of(tensors: Mapping[str, StoredTensor]) -> str:
    """Identifies weights, by `digest_of_files` over those that they lie in."""
    headers = {file: header for entry in tensors.values() for file, header in entry.files.items()}
    return digest_of_files(headers, {entry.form for entry in tensors.values()} - {""})


def scan_tensors(folder: Path, kinds: Mapping[str, torch.dtype] = FLOATS) -> dict[str, TensorEntry]:
    """Every tensor of the folder, by its name with the `model.` prefix. kinds: the types that are accepted."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file():
        return read_header(single, kinds)
    if not index.is_file():
        raise CheckpointError(f"{folder}: neither model.safetensors nor model.safetensors.index.json is there")
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index}: weight_map is not an object of tensor names to file names")
    found: dict[str, TensorEntry] = {}
    for name in sorted(set(names.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {shown(name)} is not the name of a .safetensors file in the folder")
        found.update(read_header(folder / name, kinds))
    for name in names:
        if _canonical(name) not in found:
            raise CheckpointError(f"{index}: tensor {name[:200]} is not in {names[name]}")
    return found


def _canonical(name: str) -> str:
    """Some exports leave out the `model.` prefix."""
    bare = name.startswith(("layers.", "embed_tokens.", "norm."))
    return f"model.{name}" if bare else name


def _header_length(path: Path, file: BinaryIO) -> int:
    file.seek(0)
    prefix = file.read(8)
    file.seek(0)
    size = path.stat().st_size
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > MAX_HEADER or 8 + length > size:
        raise CheckpointError(f"{path}: truncated or not a safetensors file")
    return length


def read_header(path: Path, kinds: Mapping[str, torch.dtype] = FLOATS) -> dict[str, TensorEntry]:
    """Every tensor of one safetensors file, by its name with the `model.` prefix; nothing but the header is read."""
    try:
        with open_regular(path) as file:
            length = _header_length(path, file)
            file.seek(8)
            header = bounded_json.loads(file.read(length).decode(), _MAX_PARTS)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        what = f"not valid JSON, or has more than {_MAX_PARTS} lists and objects"
        raise CheckpointError(f"{path}: the safetensors header is {what}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not an object")
    header.pop("__metadata__", None)
    size = path.stat().st_size
    entries = {name: _entry(path, name, value, (8 + length, size), kinds) for name, value in header.items()}
    last, end = "", 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < end:
            raise CheckpointError(f"{path}: the bytes of {last[:200]} and {name[:200]} overlap")
        last, end = name, entry.stop
    return {_canonical(name): entry for name, entry in entries.items()}


def _entry(
    path: Path, name: str, value: object, ends: tuple[int, int], kinds: Mapping[str, torch.dtype]
) -> TensorEntry:
    """ends: of the file's header, and of the file."""
    base, size = ends
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if len(
            shape
        ) <= _MAX_RANK and all(isinstance(length, int) and 0 <= length < 1 << 40 for length in shape):
            name = name[:200]
        case _:
            raise CheckpointError(f"{path}: the safetensors header of {name[:200]} is malformed")
    if dtype not in kinds:
        raise CheckpointError(f"{path}: {name} has dtype {dtype[:40]}; accepted: {', '.join(kinds)}")
    if not 0 <= start <= stop or base + stop > size:
        raise CheckpointError(f"{path}: truncated: {name} ends past the end of the file")
    if stop - start != math.prod(shape) * kinds[dtype].itemsize:
        raise CheckpointError(f"{path}: {name} has {stop - start} bytes, which its shape and dtype do not need")
    return TensorEntry(path, kinds[dtype], tuple(shape), base + start, base + stop, base)


def check_tensors(folder: Path, tensors: Mapping[str, StoredTensor], expected: Shapes, what: str) -> None:
    """Raises CheckpointError for a tensor that is missing, has another shape or is no part of `what`."""
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{folder}: tensor {name} is missing")
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {list(tensors[name].shape)}; accepted here: {list(shape)}"
            )
    for name in tensors:
        if name not in expected:
            raise CheckpointError(f"{folder}: tensor {name[:200]} is not part of {what}")

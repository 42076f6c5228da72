"""The tensors of a folder in safetensors format: one file, or several with an index. Nothing is ever unpickled.

Headers are parsed here, for three reasons. Their offsets are needed for the digest of the weights. A file that shrinks
while it is read is an error; with a memory map it would be a crash. Nothing is allocated before it is checked.
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
from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.config_fields import open_regular, read_json
from adapters.checkpoint.finite_check import check_finite
from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout
from adapters.checkpoint.weights_digest import MAX_HEADER, digest_of_files

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# The other element types of packed matrices. Only the packing knows what their numbers stand for.
PACKED = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8}
ALL = {**FLOATS, **PACKED}
_MAX_PARTS = 1 << 18  # lists and objects in a header: three for each tensor
_MAX_RANK = 8

Shapes = Mapping[str, tuple[int, ...]]  # the shapes of tensors, by their published names
# Reads the bytes of an entry as a tensor. The text is the name of the tensor for error messages.
Fetch = Callable[["TensorEntry", str], Tensor]


class StoredTensor(Protocol):
    """One tensor of a checkpoint, in any format.

    Its stored parts may be fetched to a device first. Then the tensor is made there, with the same bits.
    """

    @property
    def files(self) -> Mapping[Path, int]:
        """The files that hold the tensor, with the size of each file's header in bytes."""
        ...

    @property
    def packing_name(self) -> str:
        """The name of the packing, or an empty text. Equal bytes that are read differently have different names."""
        ...

    @property
    def nbytes(self) -> int:
        """The size of the tensor as it is stored, in bytes."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor that `read` returns."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        """The stored parts to fetch. Empty: the tensor must be made on the host."""
        ...

    def read(self, name: str, fetch: Fetch = ...) -> Tensor:
        """Return the tensor, on the host or on the device to which it was fetched. Raises CheckpointError.

        name: for error messages.
        """
        ...

    @property
    def layout(self) -> StepLayout | None:
        """The layout in which the tensor can be multiplied with packed, or None."""
        ...

    def read_packed(self, name: str, fetch: Fetch = ...) -> PackedMatrix:
        """Return a tensor that has a layout, packed. Raises CheckpointError."""
        ...

    def with_dtype(self, dtype: torch.dtype) -> StoredTensor:
        """Return this tensor with `dtype` as the dtype of what `read` returns. Only packed tensors can choose it."""
        ...


@frozen
class TensorEntry:
    """One tensor in a safetensors file: the bytes `[start, stop)` of `file`. header: size of the file's header."""

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
    def packing_name(self) -> str:
        return ""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        return (self,)

    def read(self, name: str, fetch: Fetch | None = None) -> Tensor:
        """Return the tensor as stored, on the host, or as `fetch` returns it. name: for error messages."""
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

    def read_packed(self, name: str, fetch: Fetch | None = None) -> PackedMatrix:  # noqa: ARG002
        raise AssertionError(f"{name} is not packed")

    def slice_rows(self, first: int, count: int) -> TensorEntry:
        """Return `count` of its rows. In a stack of matrices, the rows of all matrices are counted through."""
        width = self.shape[-1]
        start = self.start + first * width * self.dtype.itemsize
        return evolve(self, shape=(count, width), start=start, stop=start + count * width * self.dtype.itemsize)

    def select(self, number: int) -> TensorEntry:
        """Return one of the tensors of a stack, by its number along the first dimension."""
        size = self.nbytes // self.shape[0]
        start = self.start + number * size
        return evolve(self, shape=self.shape[1:], start=start, stop=start + size)

    def with_dtype(self, dtype: torch.dtype) -> TensorEntry:  # noqa: ARG002 - unpacked tensors are read as stored
        return self


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors files."""
    return next(kind for kind, known_dtype in ALL.items() if known_dtype == dtype)


def read_bytes(path: Path, start: int, stop: int, name: str) -> bytearray:
    """Read the bytes `[start, stop)` of a file, which belong to the tensor `name`. Raises CheckpointError."""
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


def digest_tensors(tensors: Mapping[str, StoredTensor]) -> str:
    """Return the digest that identifies weights: `digest_of_files` over all files that hold them."""
    headers = {file: header for entry in tensors.values() for file, header in entry.files.items()}
    return digest_of_files(headers, {entry.packing_name for entry in tensors.values()} - {""})


def scan_tensors(folder: Path, kinds: Mapping[str, torch.dtype] = FLOATS) -> dict[str, TensorEntry]:
    """Return all tensors of a folder by their names with the `model.` prefix. kinds: the accepted types."""
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
            raise CheckpointError(
                f"{index}: {describe_value(name)} is not the name of a .safetensors file in the folder"
            )
        found.update(read_header(folder / name, kinds))
    for name in names:
        if _canonical_name(name) not in found:
            raise CheckpointError(f"{index}: tensor {name[:200]} is not in {names[name]}")
    return found


def _canonical_name(name: str) -> str:
    """Return a tensor's name with the `model.` prefix, which some exports leave out."""
    bare = name.startswith(("layers.", "embed_tokens.", "norm."))
    return f"model.{name}" if bare else name


def _read_header_length(path: Path, file: BinaryIO) -> int:
    """Return the bytes of the JSON header behind its 8 bytes of length. Raises CheckpointError for a truncated file."""
    file.seek(0)
    prefix = file.read(8)
    file.seek(0)
    size = path.stat().st_size
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > MAX_HEADER or 8 + length > size:
        raise CheckpointError(f"{path}: truncated or not a safetensors file")
    return length


def read_header(path: Path, kinds: Mapping[str, torch.dtype] = FLOATS) -> dict[str, TensorEntry]:
    """Return all tensors of one safetensors file, by their names with the `model.` prefix. Reads only the header."""
    try:
        with open_regular(path) as file:
            length = _read_header_length(path, file)
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
    entries = {name: _read_entry(path, name, value, (8 + length, size), kinds) for name, value in header.items()}
    last = ""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < end:
            raise CheckpointError(f"{path}: the bytes of {last[:200]} and {name[:200]} overlap")
        last = name
        end = entry.stop
    return {_canonical_name(name): entry for name, entry in entries.items()}


def _read_entry(
    path: Path, name: str, value: object, ends: tuple[int, int], kinds: Mapping[str, torch.dtype]
) -> TensorEntry:
    """Check one entry of a header. Raises CheckpointError. ends: where the header and the file end, in bytes."""
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


def check_expected_tensors(folder: Path, tensors: Mapping[str, StoredTensor], expected: Shapes, owner: str) -> None:
    """Raise CheckpointError for a tensor that is missing, has another shape or is not part of `owner`.

    owner: the model in words, for the message. Used when a checkpoint of a target or of a draft is opened.
    """
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{folder}: tensor {name} is missing")
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {list(tensors[name].shape)}; accepted here: {list(shape)}"
            )
    for name in tensors:
        if name not in expected:
            raise CheckpointError(f"{folder}: tensor {name[:200]} is not part of {owner}")

"""Parses the header of a GGUF file: the metadata, and where tensors lie. Every claim of the file is checked first.

The `gguf` package is not used for this. It makes an array of every entry, follows lists inside lists, and trusts
counts: a vocabulary takes seconds, and a hostile file any time. Here no more is read than the length of the header, and
texts are decoded only when they are asked for. There are few imports, so that a bad file is refused before torch is
imported. Tensors are not mapped into memory: a file that shrinks is an error, and with a map it would be a crash.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from attrs import define, field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import open_regular
from adapters.checkpoint.gguf.types import ACCEPTED, PACKINGS, REFUSED, Packing

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 had counts of 32 bits, and is older than any model that is served
MAX_HEADER_BYTES = 1 << 26  # a vocabulary of 248,320 with its merges takes 13 MiB
MAX_FIELDS = 1 << 12  # published files have some 50
MAX_TENSORS = 1 << 14  # 512 layers have 20 each at most
MAX_LIST_ITEMS = 1 << 20  # of all lists together: a vocabulary of 248,320 has three lists of about as many
MAX_NAME_BYTES = 1 << 10
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
_PIECE = 1 << 20

# Numbers of the kinds of fields.
_FLOATS = {6, 12}
_BOOL = 7
_TEXT = 8
_LIST = 9
_SCALARS: Mapping[int, struct.Struct] = {
    number: struct.Struct("<" + code)
    for number, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_LENGTH = struct.Struct("<Q")

Value: TypeAlias = "int | float | bool | str | ListField"


@frozen
class ListField:
    """A list in the metadata: `count` values of one kind, from the byte `start` of the header on."""

    kind: int
    count: int
    start: int


@frozen
class GgufTensorInfo:
    """One tensor in a GGUF file: the bytes `[start, stop)` of `file`, packed row by row. header: size of the header."""

    file: Path
    packing: Packing
    shape: tuple[int, ...]
    start: int
    stop: int
    header: int


@frozen
class GgufHeader:
    """A parsed header. `data`: its bytes, from which lists are decoded."""

    path: Path
    fields: Mapping[str, Value]
    tensors: Mapping[str, GgufTensorInfo]
    data: bytes = field(repr=False)

    def read_texts(self, name: str) -> list[str]:
        """Return a list of texts of the metadata. Raises CheckpointError where it is none."""
        found = self.fields.get(name)
        if not isinstance(found, ListField) or found.kind != _TEXT:
            raise CheckpointError(f"{self.path}: {name} is {'missing' if found is None else 'not a list of texts'}")
        texts = list[str]()
        at = found.start
        try:
            for _ in range(found.count):
                stop = at + 8 + _LENGTH.unpack_from(self.data, at)[0]
                texts.append(self.data[at + 8 : stop].decode())
                at = stop
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {name} has an entry that is not UTF-8 text") from None
        return texts

    def read_integers(self, name: str) -> list[int]:
        """Return a list of integers of the metadata. Raises CheckpointError where it is none."""
        found: list[int] = self._read_numbers(name, "integers", lambda kind: kind not in {_TEXT, _BOOL, *_FLOATS})
        return found

    def read_flags(self, name: str) -> list[bool]:
        """Return a list of flags of the metadata. Raises CheckpointError where it is none."""
        found = self.fields.get(name)
        if not isinstance(found, ListField) or found.kind != _BOOL:
            raise CheckpointError(f"{self.path}: {name} is {'missing' if found is None else 'not a list of flags'}")
        return [byte != 0 for byte in self.data[found.start : found.start + found.count]]

    def read_floats(self, name: str) -> list[float]:
        """Return a list of floats of the metadata. Raises CheckpointError where it is none."""
        found: list[float] = self._read_numbers(name, "floats", _FLOATS.__contains__)
        return found

    def _read_numbers(self, name: str, element_kind: str, fits: Callable[[int], bool]) -> Any:
        """Return a list of numbers of the kinds that `fits` accepts. Raises CheckpointError."""
        found = self.fields.get(name)
        if not isinstance(found, ListField) or not fits(found.kind):
            raise CheckpointError(
                f"{self.path}: {name} is {'missing' if found is None else f'not a list of {element_kind}'}"
            )
        scalar = _SCALARS[found.kind]
        numbers = array(scalar.format[1:])
        numbers.frombytes(self.data[found.start : found.start + found.count * scalar.size])
        return numbers.tolist()


def is_gguf(path: Path) -> bool:
    """Is this a regular file with the suffix or the first bytes of a GGUF file?"""
    if not path.is_file():  # reading a pipe would block
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_header(path: Path, packings: Mapping[int, Packing] = PACKINGS) -> GgufHeader:
    """Read the header of one file. packings: the accepted types of tensors. Raises CheckpointError, one line."""
    try:
        with open_regular(path) as file:
            return _HeaderReader(path, file, os.fstat(file.fileno()).st_size, packings).read_header()
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


@define
class _HeaderReader:
    """Reads one header. position: up to this byte it is parsed. item_count: items of all lists so far."""

    path: Path
    file: BinaryIO
    size: int
    packings: Mapping[int, Packing]
    position: int = 0
    data: bytearray = field(factory=bytearray)
    item_count: int = 0

    def read_header(self) -> GgufHeader:
        """Parse the whole header. Raises CheckpointError."""
        if self.take_bytes(4) != MAGIC:
            raise self.make_error("not a GGUF file")
        version = self.read_scalar(4)
        if version not in VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in VERSIONS
            what = "big-endian" if swapped else f"of version {version}"
            raise self.make_error(f"is a GGUF file that is {what}; accepted: little-endian ones of version 2 or 3")
        tensors = int(self.read_scalar(10))
        fields = int(self.read_scalar(10))
        if tensors > MAX_TENSORS or fields > MAX_FIELDS:
            raise self.make_error(
                f"has {tensors} tensors and {fields} fields; accepted: {MAX_TENSORS} and {MAX_FIELDS}"
            )
        found = self.read_fields(fields)
        infos = [self.read_tensor_info() for _ in range(tensors)]
        alignment = found.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.make_error(f"general.alignment is not a power of two in 8..{MAX_ALIGNMENT}")
        base = -(-self.position // alignment) * alignment
        stored = {}
        for name, packing, shape, offset in infos:
            if name in stored:
                raise self.make_error(f"tensor {name} is there twice")
            if offset % alignment:
                raise self.make_error(f"tensor {name} is not aligned to {alignment} bytes")
            stored[name] = self.locate_tensor(name, packing, shape, base + offset)
        self.check_apart(stored)
        return GgufHeader(self.path, found, stored, bytes(self.data[: self.position]))

    def read_fields(self, count: int) -> dict[str, Value]:
        """Parse the metadata. Raises CheckpointError."""
        found = dict[str, Value]()
        for _ in range(count):
            name = self.read_name("the name of a field")
            if name in found:
                raise self.make_error(f"field {name} is there twice")
            found[name] = self.read_value(name)
        return found

    def read_value(self, name: str) -> Value:
        kind = int(self.read_scalar(4))
        if kind == _TEXT:
            return self.read_text(name, MAX_HEADER_BYTES)
        if kind == _LIST:
            return self.read_list(name)
        if kind not in _SCALARS:
            raise self.make_error(f"field {name} is of the unknown kind {kind}")
        return self.read_scalar(kind)

    def read_list(self, name: str) -> ListField:
        """Parse a list without decoding its values. Raises CheckpointError."""
        kind = int(self.read_scalar(4))
        count = int(self.read_scalar(10))
        if kind not in _SCALARS and kind != _TEXT:
            what = "lists" if kind == _LIST else f"the unknown kind {kind}"
            raise self.make_error(f"field {name} is a list of {what}; accepted: lists of texts or numbers")
        self.item_count += count
        if self.item_count > MAX_LIST_ITEMS:
            raise self.make_error(f"field {name} has {count} entries; accepted: {MAX_LIST_ITEMS} in all lists together")
        found = ListField(kind, count, self.position)
        if kind != _TEXT:
            self.read_until(self.position + count * _SCALARS[kind].size)
            self.position += count * _SCALARS[kind].size
            return found
        data = self.data
        at = self.position
        for _ in range(count):
            if at + 8 > len(data):
                self.read_until(at + 8)
            at += 8 + _LENGTH.unpack_from(data, at)[0]
            if at > len(data):
                self.read_until(at)
        self.position = at
        return found

    def read_tensor_info(self) -> tuple[str, Packing, tuple[int, ...], int]:
        """Parse the name, packing, shape and offset of one tensor. Raises CheckpointError."""
        name = self.read_name("the name of a tensor")
        rank = int(self.read_scalar(4))
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise self.make_error(f"tensor {name} has {rank} dimensions; accepted: 1 to {MAX_DIMENSIONS}")
        shape = tuple(int(self.read_scalar(10)) for _ in range(rank))[::-1]  # files have the last dimension first
        kind = int(self.read_scalar(4))
        offset = int(self.read_scalar(10))
        if kind not in self.packings:
            raise self.make_error(f"tensor {name} has type {REFUSED.get(kind, kind)}; accepted: {ACCEPTED}")
        return name, self.packings[kind], shape, offset

    def locate_tensor(self, name: str, packing: Packing, shape: tuple[int, ...], start: int) -> GgufTensorInfo:
        """Return where a tensor lies in the file. Raises CheckpointError for a size that does not fit."""
        if shape[-1] % packing.count:
            raise self.make_error(f"tensor {name} has rows of {shape[-1]}, which are no whole blocks of {packing.name}")
        count = 1
        for length in shape:
            count *= length
            if not 0 < count < 1 << 48:
                raise self.make_error(f"tensor {name} has shape {list(shape)}")
        stop = start + count // packing.count * packing.size
        if stop > self.size:
            raise self.make_error(f"truncated: {name} ends past the end of the file")
        return GgufTensorInfo(self.path, packing, shape, start, stop, self.position)

    def check_apart(self, stored: Mapping[str, GgufTensorInfo]) -> None:
        """Raise CheckpointError where the bytes of two tensors overlap."""
        last = ""
        end = 0
        for name, tensor in sorted(stored.items(), key=lambda item: item[1].start):
            if tensor.start < end:
                raise self.make_error(f"the bytes of {last} and {name} overlap")
            last = name
            end = tensor.stop

    def read_name(self, subject: str) -> str:
        return self.read_text(subject, MAX_NAME_BYTES)

    def read_text(self, what: str, most: int) -> str:
        length = int(self.read_scalar(10))
        if length > most:
            raise self.make_error(f"{what} has {length} bytes; accepted: up to {most}")
        try:
            return self.take_bytes(length).decode()
        except UnicodeDecodeError:
            raise self.make_error(f"{what} is not UTF-8 text") from None

    def read_scalar(self, kind: int) -> int | float | bool:
        scalar = _SCALARS[kind]
        self.read_until(self.position + scalar.size)
        (value,) = scalar.unpack_from(self.data, self.position)
        self.position += scalar.size
        return value

    def take_bytes(self, count: int) -> bytes:
        self.read_until(self.position + count)
        self.position += count
        return bytes(self.data[self.position - count : self.position])

    def read_until(self, stop: int) -> None:
        """Read the file until `data` holds the first `stop` bytes. Raises CheckpointError."""
        if stop > self.size:
            raise self.make_error("truncated or not a GGUF file: its header goes on past the end")
        if stop > MAX_HEADER_BYTES:
            raise self.make_error(f"a header of more than {MAX_HEADER_BYTES >> 20} MiB")
        while len(self.data) < stop:
            piece = self.file.read(min(max(_PIECE, stop - len(self.data)), self.size - len(self.data)))
            if not piece:
                raise self.make_error("truncated while it was read")
            self.data += piece

    def make_error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}")

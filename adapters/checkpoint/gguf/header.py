"""The header of a GGUF file: metadata, and where tensors lie. Whatever it claims is checked before it is believed.

It is read by hand. The `gguf` package makes arrays of every entry, follows lists in lists, and believes counts: a
vocabulary takes it seconds, and a hostile file as long as it likes. Here no more is read than the header is long,
texts are found but not made before somebody asks for them, and imports are few: a start is refused before it has
imported torch. Tensors are not mapped: a file that shrinks under us is an error, and would be a crash with a map of it.
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
VERSIONS = (2, 3)  # 1 had counts of 32 bits, and is from before any model that is served
MOST_BYTES = 1 << 26  # a vocabulary of 248,320 with its merges takes 13 MiB
MOST_FIELDS = 1 << 12  # published files have some 50
MOST_TENSORS = 1 << 14  # 512 layers have 20 each at most
MOST_ITEMS = 1 << 20  # of all lists together: a vocabulary of 248,320 has three lists of about as many
MOST_NAME = 1 << 10
MOST_DIMENSIONS = 4
MOST_ALIGNMENT = 1 << 16
_PIECE = 1 << 20

_FLOATS, _BOOL, _TEXT, _LIST = {6, 12}, 7, 8, 9
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

Value: TypeAlias = "int | float | bool | str | Items"


@frozen
class Items:
    """A list in the metadata: `count` values of one kind, from `start` on."""

    kind: int
    count: int
    start: int


@frozen
class Stored:
    """Where one tensor lies: bytes `[start, stop)` of `file`, packed row by row. header: bytes before all tensors."""

    file: Path
    packing: Packing
    shape: tuple[int, ...]
    start: int
    stop: int
    header: int


@frozen
class GgufHeader:
    """What a file says of itself. `data`: the bytes that its lists are read from."""

    path: Path
    fields: Mapping[str, Value]
    tensors: Mapping[str, Stored]
    data: bytes = field(repr=False)

    def texts(self, name: str) -> list[str]:
        """A list of texts of the metadata. Raises CheckpointError where it is none."""
        found = self.fields.get(name)
        if not isinstance(found, Items) or found.kind != _TEXT:
            raise CheckpointError(f"{self.path}: {name} is {'missing' if found is None else 'not a list of texts'}")
        texts, at = list[str](), found.start
        try:
            for _ in range(found.count):
                stop = at + 8 + _LENGTH.unpack_from(self.data, at)[0]
                texts.append(self.data[at + 8 : stop].decode())
                at = stop
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {name} has an entry that is not UTF-8 text") from None
        return texts

    def integers(self, name: str) -> list[int]:
        """A list of integers of the metadata. Raises CheckpointError where it is none."""
        found: list[int] = self._numbers(name, "integers", lambda kind: kind not in {_TEXT, _BOOL, *_FLOATS})
        return found

    def floats(self, name: str) -> list[float]:
        """A list of floats of the metadata. Raises CheckpointError where it is none."""
        found: list[float] = self._numbers(name, "floats", _FLOATS.__contains__)
        return found

    def _numbers(self, name: str, what: str, fits: Callable[[int], bool]) -> Any:
        found = self.fields.get(name)
        if not isinstance(found, Items) or not fits(found.kind):
            raise CheckpointError(f"{self.path}: {name} is {'missing' if found is None else f'not a list of {what}'}")
        one = _SCALARS[found.kind]
        numbers = array(one.format[1:])
        numbers.frombytes(self.data[found.start : found.start + found.count * one.size])
        return numbers.tolist()


def is_gguf(path: Path) -> bool:
    """A regular file that is called so, or begins so."""
    if not path.is_file():  # a pipe would be waited for
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_header(path: Path) -> GgufHeader:
    """Of one file. Raises CheckpointError, one line."""
    try:
        with open_regular(path) as file:
            return _Reading(path, file, os.fstat(file.fileno()).st_size).header()
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


@define
class _Reading:
    """A header while it is read. `at`: how far."""

    path: Path
    file: BinaryIO
    size: int
    at: int = 0
    data: bytearray = field(factory=bytearray)
    items: int = 0

    def header(self) -> GgufHeader:
        if self.take(4) != MAGIC:
            raise self.wrong("not a GGUF file")
        version = self.scalar(4)
        if version not in VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in VERSIONS
            what = "big-endian" if swapped else f"of version {version}"
            raise self.wrong(f"is a GGUF file that is {what}; accepted: little-endian ones of version 2 or 3")
        tensors, fields = int(self.scalar(10)), int(self.scalar(10))
        if tensors > MOST_TENSORS or fields > MOST_FIELDS:
            raise self.wrong(f"has {tensors} tensors and {fields} fields; accepted: {MOST_TENSORS} and {MOST_FIELDS}")
        found = self.fields(fields)
        infos = [self.info() for _ in range(tensors)]
        alignment = found.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
            raise self.wrong(f"general.alignment is not a power of two in 8..{MOST_ALIGNMENT}")
        base = -(-self.at // alignment) * alignment
        stored = {}
        for name, packing, shape, offset in infos:
            if name in stored:
                raise self.wrong(f"tensor {name} is there twice")
            if offset % alignment:
                raise self.wrong(f"tensor {name} is not aligned to {alignment} bytes")
            stored[name] = self.stored(name, packing, shape, base + offset)
        self.check_apart(stored)
        return GgufHeader(self.path, found, stored, bytes(self.data[: self.at]))

    def fields(self, count: int) -> dict[str, Value]:
        found = dict[str, Value]()
        for _ in range(count):
            name = self.name("the name of a field")
            if name in found:
                raise self.wrong(f"field {name} is there twice")
            found[name] = self.value(name)
        return found

    def value(self, name: str) -> Value:
        kind = int(self.scalar(4))
        if kind == _TEXT:
            return self.text(name, MOST_BYTES)
        if kind == _LIST:
            return self.list(name)
        if kind not in _SCALARS:
            raise self.wrong(f"field {name} is of the unknown kind {kind}")
        return self.scalar(kind)

    def list(self, name: str) -> Items:
        kind, count = int(self.scalar(4)), int(self.scalar(10))
        if kind not in _SCALARS and kind != _TEXT:
            what = "lists" if kind == _LIST else f"the unknown kind {kind}"
            raise self.wrong(f"field {name} is a list of {what}; accepted: lists of texts or numbers")
        self.items += count
        if self.items > MOST_ITEMS:
            raise self.wrong(f"field {name} has {count} entries; accepted: {MOST_ITEMS} in all lists together")
        found = Items(kind, count, self.at)
        if kind != _TEXT:
            self.reach(self.at + count * _SCALARS[kind].size)
            self.at += count * _SCALARS[kind].size
            return found
        data, at = self.data, self.at
        for _ in range(count):
            if at + 8 > len(data):
                self.reach(at + 8)
            at += 8 + _LENGTH.unpack_from(data, at)[0]
            if at > len(data):
                self.reach(at)
        self.at = at
        return found

    def info(self) -> tuple[str, Packing, tuple[int, ...], int]:
        name = self.name("the name of a tensor")
        rank = int(self.scalar(4))
        if not 1 <= rank <= MOST_DIMENSIONS:
            raise self.wrong(f"tensor {name} has {rank} dimensions; accepted: 1 to {MOST_DIMENSIONS}")
        shape = tuple(int(self.scalar(10)) for _ in range(rank))[::-1]  # the last is told first
        kind, offset = int(self.scalar(4)), int(self.scalar(10))
        if kind not in PACKINGS:
            raise self.wrong(f"tensor {name} has type {REFUSED.get(kind, kind)}; accepted: {ACCEPTED}")
        return name, PACKINGS[kind], shape, offset

    def stored(self, name: str, packing: Packing, shape: tuple[int, ...], start: int) -> Stored:
        if shape[-1] % packing.count:
            raise self.wrong(f"tensor {name} has rows of {shape[-1]}, which are no whole blocks of {packing.name}")
        count = 1
        for length in shape:
            count *= length
            if not 0 < count < 1 << 48:
                raise self.wrong(f"tensor {name} has shape {list(shape)}")
        stop = start + count // packing.count * packing.size
        if stop > self.size:
            raise self.wrong(f"truncated: {name} ends past the end of the file")
        return Stored(self.path, packing, shape, start, stop, self.at)

    def check_apart(self, stored: Mapping[str, Stored]) -> None:
        last, end = "", 0
        for name, tensor in sorted(stored.items(), key=lambda item: item[1].start):
            if tensor.start < end:
                raise self.wrong(f"the bytes of {last} and {name} overlap")
            last, end = name, tensor.stop

    def name(self, what: str) -> str:
        return self.text(what, MOST_NAME)

    def text(self, what: str, most: int) -> str:
        length = int(self.scalar(10))
        if length > most:
            raise self.wrong(f"{what} has {length} bytes; accepted: up to {most}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.wrong(f"{what} is not UTF-8 text") from None

    def scalar(self, kind: int) -> int | float | bool:
        one = _SCALARS[kind]
        self.reach(self.at + one.size)
        (value,) = one.unpack_from(self.data, self.at)
        self.at += one.size
        return value

    def take(self, count: int) -> bytes:
        self.reach(self.at + count)
        self.at += count
        return bytes(self.data[self.at - count : self.at])

    def reach(self, stop: int) -> None:
        """So much of the file is in `data`."""
        if stop > self.size:
            raise self.wrong("truncated or not a GGUF file: its header goes on past the end")
        if stop > MOST_BYTES:
            raise self.wrong(f"a header of more than {MOST_BYTES >> 20} MiB")
        while len(self.data) < stop:
            piece = self.file.read(min(max(_PIECE, stop - len(self.data)), self.size - len(self.data)))
            if not piece:
                raise self.wrong("truncated while it was read")
            self.data += piece

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}")

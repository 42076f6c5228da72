"""What a GGUF file's metadata say of its model: of one file, or of the first of several that a model was split into."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError, shown
from adapters.checkpoint.gguf.header import MOST_TENSORS, GgufHeader, Items, Stored, Value, read_header

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MOST_PARTS = 1 << 10
GREATEST = 1e30


@frozen
class Metadata:
    """path: of the (first) file. architecture: what llama.cpp calls the family. tensors: of all files."""

    path: Path
    architecture: str
    fields: Mapping[str, Value]
    tensors: Mapping[str, Stored]

    def own(self, name: str) -> Value | None:
        """A field of the architecture's."""
        return self.fields.get(f"{self.architecture}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        """Raises CheckpointError where it is no integer; without a default it must be there."""
        value = self.own(name)
        value = default if value is None else value
        if isinstance(value, Items):
            raise self.wrong(f"{self.architecture}.{name} is a list; accepted: one number, for layers that are alike")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(f"{self.architecture}.{name} {self.found(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.own(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(f"{self.architecture}.{name} {self.found(value)}")
        return shortest(value)

    def refuse(self, name: str, *accepted: Any) -> None:
        """Raises CheckpointError for a field that is told and is none of these."""
        told = self.own(name)
        if told is not None and told not in accepted:
            raise self.wrong(f"{self.architecture}.{name} {shown(told)} is not supported; accepted: {accepted[0]!r}")

    def found(self, value: object) -> str:
        return "is missing" if value is None else f"is {shown(value)}, which is no number"

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}")


def shortest(value: float) -> float:
    """The shortest decimal that is this number in float32, in which files have what config.json says in decimals."""
    if abs(value) > GREATEST:  # or no number at all: whoever reads it refuses it
        return value
    for digits in range(1, 10):
        if struct.pack("<f", found := float(f"{value:.{digits}g}")) == struct.pack("<f", value):
            return found
    return value


def read_metadata(path: Path) -> Metadata:
    """Of a model in one file or in several, of which this is the first. Raises CheckpointError, one line."""
    first = read_header(path)
    tensors = all_tensors(first)  # before what only the first of several files says
    architecture = first.fields.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path}: general.architecture is missing")
    return Metadata(path, architecture, first.fields, tensors)


def all_tensors(first: GgufHeader) -> Mapping[str, Stored]:
    parts = first.fields.get("split.count", 1)
    if parts in {0, 1}:
        return first.tensors
    if not isinstance(parts, int) or not 1 < parts <= MOST_PARTS:
        raise CheckpointError(f"{first.path}: split.count {shown(parts)} is not a number up to {MOST_PARTS}")
    named = PART.fullmatch(first.path.name)
    if named is None or int(named[3]) != parts:
        what = f"its name does not end in -00001-of-{parts:05}.gguf, by which the others are found"
        raise CheckpointError(f"{first.path}: one of {parts} files, but {what}")
    if int(named[2]) != 1 or first.fields.get("split.no") != 0:
        start = f"{named[1]}-00001-of-{parts:05}.gguf"
        raise CheckpointError(f"{first.path}: not the first of {parts} files; accepted: {start}")
    tensors = dict(first.tensors)
    for part in range(1, parts):
        header = read_header(first.path.with_name(f"{named[1]}-{part + 1:05}-of-{parts:05}.gguf"))
        if header.fields.get("split.no") != part or header.fields.get("split.count") != parts:
            raise CheckpointError(f"{header.path}: not part {part + 1} of {parts} of {first.path.name}")
        if twice := tensors.keys() & header.tensors.keys():
            raise CheckpointError(f"{header.path}: tensor {min(twice)} is in an earlier part, too")
        tensors |= header.tensors
        if len(tensors) > MOST_TENSORS:
            raise CheckpointError(f"{header.path}: more than {MOST_TENSORS} tensors in the parts so far")
    total = first.fields.get("split.tensors.count")
    if total is not None and total != len(tensors):
        raise CheckpointError(f"{first.path}: its {parts} parts have {len(tensors)} tensors, not {shown(total)}")
    return tensors


def model_name(path: Path) -> str:
    """What a model is called that is served from this file: the name without its endings."""
    part = PART.fullmatch(path.name)
    return part[1] if part else path.name.removesuffix(".gguf")

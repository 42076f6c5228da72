"""The metadata of a model in GGUF format, which is one file or the first of several files."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.gguf.header import MAX_TENSORS, GgufHeader, GgufTensorInfo, ListField, Value, read_header
from adapters.checkpoint.gguf.types import PACKINGS, Packing

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAX_PARTS = 1 << 10
GREATEST = 1e30
T = TypeVar("T")


@frozen
class Metadata:
    """The metadata of a model.

    architecture: llama.cpp's name of the family. header: of the file, or of the first of several. tensors: those of all
    files.
    """

    architecture: str
    header: GgufHeader
    tensors: Mapping[str, GgufTensorInfo]

    @property
    def path(self) -> Path:
        return self.header.path

    def find_field(self, name: str) -> Value | None:
        """Return a field of the architecture, or None."""
        return self.header.fields.get(f"{self.architecture}.{name}")

    def read_count(self, name: str, default: int | None = None) -> int:
        """Return an integer field. Without a default it must be there. Raises CheckpointError."""
        value = self.find_field(name)
        value = default if value is None else value
        if isinstance(value, ListField):
            raise self.make_error(
                f"{self.architecture}.{name} is a list; accepted: one number, for layers that are alike"
            )
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.make_error(f"{self.architecture}.{name} {self.describe_non_number(value)}")
        return value

    def read_layer_counts(self, name: str, layers: int, default: int | None = None) -> list[int]:
        """Return an integer for each layer. The file has one for all of them, or a list. Raises CheckpointError."""
        if not isinstance(self.find_field(name), ListField):
            return [self.read_count(name, default)] * layers
        return self._check_length(name, self.header.read_integers(f"{self.architecture}.{name}"), layers)

    def read_layer_flags(self, name: str, layers: int) -> list[bool]:
        """Return a list of flags, one for each layer. Raises CheckpointError."""
        return self._check_length(name, self.header.read_flags(f"{self.architecture}.{name}"), layers)

    def _check_length(self, name: str, found: list[T], layers: int) -> list[T]:
        if len(found) != layers:
            raise self.make_error(f"{self.architecture}.{name} has {len(found)} entries; accepted: {layers}")
        return found

    def read_number(self, name: str, default: float | None = None) -> float:
        value = self.find_field(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.make_error(f"{self.architecture}.{name} {self.describe_non_number(value)}")
        return shorten_float(value)

    def refuse(self, name: str, *accepted: Any) -> None:
        """Raise CheckpointError for a field that is there and has none of the accepted values."""
        value = self.find_field(name)
        if value is not None and value not in accepted:
            raise self.make_error(
                f"{self.architecture}.{name} {describe_value(value)} is not supported; accepted: {accepted[0]!r}"
            )

    def describe_non_number(self, value: object) -> str:
        return "is missing" if value is None else f"is {describe_value(value)}, which is no number"

    def make_error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")


def shorten_float(value: float) -> float:
    """Return the shortest decimal that has this value in float32. config.json has such decimals; files have float32."""
    if abs(value) > GREATEST:  # or infinite or NaN: the caller refuses these
        return value
    for digits in range(1, 10):
        if struct.pack("<f", found := float(f"{value:.{digits}g}")) == struct.pack("<f", value):
            return found
    return value


def read_metadata(path: Path, packings: Mapping[int, Packing] = PACKINGS) -> Metadata:
    """Read the metadata of a model. path: the file, or the first of several. Raises CheckpointError, one line.

    packings: the accepted types of tensors in the first file.
    """
    first = read_header(path, packings)
    tensors = collect_tensors(first)  # first of all, since it refuses a file that is not the first of several
    architecture = first.fields.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path}: general.architecture is missing")
    return Metadata(architecture, first, tensors)


def collect_tensors(first: GgufHeader) -> Mapping[str, GgufTensorInfo]:
    """Return the tensors of all files of a model. Raises CheckpointError where the files do not belong together."""
    parts = first.fields.get("split.count", 1)
    if parts in {0, 1}:
        return first.tensors
    if not isinstance(parts, int) or not 1 < parts <= MAX_PARTS:
        raise CheckpointError(f"{first.path}: split.count {describe_value(parts)} is not a number up to {MAX_PARTS}")
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
        if len(tensors) > MAX_TENSORS:
            raise CheckpointError(f"{header.path}: more than {MAX_TENSORS} tensors in the parts so far")
    total = first.fields.get("split.tensors.count")
    if total is not None and total != len(tensors):
        raise CheckpointError(
            f"{first.path}: its {parts} parts have {len(tensors)} tensors, not {describe_value(total)}"
        )
    return tensors


def derive_model_name(path: Path) -> str:
    """Return the name of the model in this file: the file's name without its endings."""
    part = PART.fullmatch(path.name)
    return part[1] if part else path.name.removesuffix(".gguf")

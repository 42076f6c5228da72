"""A run of blocks as a file: safetensors content in seekable zstd frames. docs/CACHE_FORMAT.md says it for people.

The content is canonical: what a run's header must be follows from the run and from our own model. A file is never asked
for shapes, it is compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from adapters.store import seekable
from adapters.store.blocks import KEY, WIDTH, chain
from adapters.store.seekable import Buffer, Compress, Damaged, Sizes

VERSION = 1
FRAME = 2 << 20  # content bytes of a frame of rows
MOST_HEAD = 8 << 20  # bytes of the first frame: header and token ids
MOST_START = 1 << 24  # tokens before a run
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
INFIX, SUFFIX = "-", ".safetensors.zst"


class Newer(Exception):
    """A file of a later format: not ours to read, and not ours to delete."""


@frozen
class Layout:
    """The rows of one model: each of `names` is `[heads, tokens, width]` of `dtype`."""

    identity: str
    grain: int
    names: tuple[str, ...]
    heads: int
    width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return len(self.names) * self.tensor_bytes(1)

    def tensor_bytes(self, tokens: int) -> int:
        return self.heads * tokens * self.width * self.dtype.itemsize

    def views(self, data: Tensor, tokens: int) -> dict[str, Tensor]:
        """`data` (uint8, all tensors end to end) as the named tensors, without a copy."""
        size, shape = self.tensor_bytes(tokens), (self.heads, tokens, self.width)
        parts = data.view(len(self.names), size)
        return {name: part.view(self.dtype).view(shape) for name, part in zip(self.names, parts, strict=True)}

    def flat(self, rows: Mapping[str, Tensor]) -> Tensor:
        """The other way round, with one copy."""
        return torch.cat([rows[name].contiguous().view(-1).view(torch.uint8) for name in self.names])


@frozen
class Run:
    """Which blocks a file holds. tokens are packed."""

    start: int
    parent: bytes
    keys: tuple[bytes, ...]
    tokens: bytes

    @property
    def length(self) -> int:
        return len(self.tokens) // WIDTH


def file_name(key: bytes, handle: int) -> str:
    return f"{key.hex()}{INFIX}{handle:016x}{SUFFIX}"


def parse_name(name: str) -> tuple[bytes, int] | None:
    """(key of the last block, handle), or None if the name is not one of ours."""
    stem = name.removesuffix(SUFFIX)
    key, _, handle = stem.partition(INFIX)
    digits = set(key + handle) <= set("0123456789abcdef")
    if stem == name or len(key) != 2 * KEY or len(handle) != 16 or not digits:
        return None
    return bytes.fromhex(key), int(handle, 16)


def head(run: Run, layout: Layout) -> bytes:
    """Everything before the rows: the safetensors header, then the token ids, its first tensor."""
    count, at = run.length, len(run.tokens)
    tensors: dict[str, Any] = {
        "__metadata__": {
            "rekindle_kv": str(VERSION),
            "identity": layout.identity,
            "grain": str(layout.grain),
            "start": str(run.start),
            "parent": run.parent.hex(),
            "key": run.keys[-1].hex(),
        },
        "tokens": {"dtype": "I32", "shape": [count], "data_offsets": [0, at]},
    }
    size = layout.tensor_bytes(count)
    for name in layout.names:
        shape = [layout.heads, count, layout.width]
        tensors[name] = {"dtype": DTYPES[layout.dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(tensors, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + run.tokens


def cuts(size: int) -> list[tuple[int, int]]:
    """The spans of the rows' bytes that are frames of their own."""
    return [(at, min(at + FRAME, size)) for at in range(0, size, FRAME)]


def encode(first: bytes, data: Buffer, codec: Compress) -> list[bytes]:
    """What to write, in order: the frame of the head, those of the rows, the seek table."""
    view = memoryview(data)
    frames, sizes = [codec.compress(first)], [len(first)]
    for start, stop in cuts(len(view)):
        frames.append(codec.compress(view[start:stop]))
        sizes.append(stop - start)
    return [*frames, seekable.table([(len(frame), size) for frame, size in zip(frames, sizes, strict=True)])]


def check_frames(frames: Sequence[Sizes], first: int, data: int) -> None:
    """Raises Damaged unless the frames hold a head of `first` bytes and `data` bytes of rows, cut as we cut them."""
    expected = [first, *(stop - start for start, stop in cuts(data))]
    if [content for _, content in frames] != expected:
        raise Damaged("the frames' sizes are not those of these rows")


def parse_head(raw: Buffer) -> tuple[Run, str, int]:
    """The run that a file of any identity says it holds, the identity and the grain. Raises Damaged or Newer."""
    try:
        size = int.from_bytes(raw[:8], "little")
        if size > len(raw) - 8:
            raise Damaged("the header goes beyond its frame")
        header = json.loads(bytes(raw[8 : 8 + size]))
        about, grain = header["__metadata__"], int(header["__metadata__"]["grain"])
        version, start = int(about["rekindle_kv"]), int(about["start"])
        if version > VERSION:
            raise Newer(f"format {version}")
        parent, key = bytes.fromhex(about["parent"]), bytes.fromhex(about["key"])
        identity = str(about["identity"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"the header cannot be read: {type(error).__name__}") from error
    tokens = bytes(raw[8 + size :])
    if not 1 <= grain <= MOST_START or not 0 <= start <= MOST_START or len(parent) != KEY or start % grain:
        raise Damaged("the header's numbers cannot be")
    if not tokens or len(tokens) % (grain * WIDTH):
        raise Damaged("the tokens are not whole blocks")
    run = Run(start, parent, chain(parent, tokens, grain), tokens)
    if run.keys[-1] != key:
        raise Damaged("the tokens do not have the key that the header says")
    return run, identity, grain

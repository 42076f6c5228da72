"""Encodes and parses the files of runs: safetensors content in seekable zstd frames (docs/CACHE_FORMAT.md).

The content is canonical: the run and our own model determine every byte of a file's header. So shapes are never read
from a file; its header is compared with the expected one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, TypeAlias, get_args

from attrs import evolve, field, frozen

from adapters.sequence_layout import ELEMENT_BYTES, RowSpec, TensorSpec
from adapters.store.block_keys import (
    KEY_BYTES,
    TOKEN_BYTES,
    chain_keys,
    compute_draft_root,
    compute_root,
    derive_checkpoint_key,
)
from adapters.store.files import seekable
from adapters.store.files.seekable import Buffer, Compress, Damaged, Sizes

VERSION = 4
FRAME = 2 << 20  # content bytes of a frame of tensors: whole blocks
MAX_HEAD_BYTES = 8 << 20  # bytes of the first frame: header and token ids
MAX_HEADER_BYTES = 1 << 20  # bytes of the header alone: 10,000 tensors
MAX_START = 1 << 24  # tokens before a run
MAX_HANDLE = 1 << 48  # turns: a million a second for nine years
MAX_IDENTITY = 128  # characters
DIGEST = 16  # bytes
INFIX = "-"
SUFFIX = ".safetensors.zst"

# The target's KV rows; a draft's own rows for the same tokens; the target's positional state behind one block.
Kind: TypeAlias = Literal["rows", "draft", "state"]


class Newer(Exception):
    """The file has a later format. It is neither read nor deleted."""


class Outdated(Exception):
    """A file of an earlier format, which nothing reads any more."""


@frozen
class DraftLayout:
    """The layout of a draft's rows. identity: that of the draft."""

    identity: str
    rows: RowSpec


def sort_by_alignment(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the tensors with wide elements first, so that each one begins at a multiple of its element's size."""
    return tuple(sorted(specs, key=lambda spec: -ELEMENT_BYTES[spec.dtype]))


@frozen(cache_hash=True)
class Layout:
    """The layout of the rows that are kept of one target, and of its draft if there is one.

    state: tensors of a model whose state at a position cannot be taken from rows. If there are any, a prefix can be
    continued only from a position that has a checkpoint.
    """

    identity: str
    block_size: int
    rows: RowSpec
    draft: DraftLayout | None = None
    state: tuple[TensorSpec, ...] = field(default=(), converter=sort_by_alignment)

    @property
    def token_bytes(self) -> int:
        """The bytes of the target's rows for one token."""
        return self.rows.token_bytes

    def get_specs(self, kind: Kind, tokens: int) -> tuple[TensorSpec, ...]:
        """Return the tensors in the order in which they lie, end to end."""
        return self.state if kind == "state" else self._get_row_spec(kind).tensor_specs(tokens)

    def compute_size(self, kind: Kind, tokens: int) -> int:
        """Return the bytes of all tensors of one kind for this many tokens."""
        if kind == "state":
            return sum(spec.nbytes for spec in self.state)
        return tokens * self._get_row_spec(kind).token_bytes

    def _get_row_spec(self, kind: Kind) -> RowSpec:
        if kind == "rows":
            return self.rows
        assert self.draft is not None, "no draft, so its rows have no layout"
        return self.draft.rows

    def compute_root(self, kind: Kind, salt: str = "") -> bytes:
        """Return the parent of the first block.

        With another draft the target's rows are found, but not this draft's rows.
        """
        if kind == "rows":
            return compute_root(self.identity, self.block_size, salt)
        assert self.draft is not None, "only rows have a root"
        return compute_draft_root(self.identity, self.draft.identity, self.block_size, salt)


@frozen
class Run:
    """The blocks that a file holds. tokens are packed.

    A checkpoint lies behind its one block, so its parent is that block's key. since: the position of the checkpoint
    before it.
    """

    start: int
    parent: bytes
    keys: tuple[bytes, ...]
    tokens: bytes
    kind: Kind = "rows"
    since: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def stop(self) -> int:
        """The number of tokens up to the end of the run."""
        return self.start + self.length


@frozen
class FileHead:
    """The description that a file begins with. sums: digest over the sums of all blocks of the tensors."""

    run: Run
    identity: str
    block_size: int
    sums: bytes


def format_name(key: bytes, handle: int) -> str:
    return f"{key.hex()}{INFIX}{handle:016x}{SUFFIX}"


def parse_name(name: str) -> tuple[bytes, int] | None:
    """Return (key of the last block, handle), or None if the name is not one of ours.

    The handle may be out of range.
    """
    stem = name.removesuffix(SUFFIX)
    key, _, handle = stem.partition(INFIX)
    digits = set(key + handle) <= set("0123456789abcdef")
    if stem == name or len(key) != 2 * KEY_BYTES or len(handle) != 16 or not digits:
        return None
    return bytes.fromhex(key), int(handle, 16)


def digest_sums(sums: Iterable[bytes]) -> bytes:
    """Return the digest that binds tensors to their head. It covers the sums of their blocks in order."""
    return blake2b(b"".join(sums), digest_size=DIGEST).digest()


def encode_head(run: Run, layout: Layout, sums: bytes) -> bytes:
    """Return everything before the tensors: the safetensors header, then the token ids, its first tensor.

    sums: the digest of the sums of all blocks of the other tensors.
    """
    before, after = encode_around_digest(run, layout)
    return before + sums.hex().encode() + after


def encode_around_digest(run: Run, layout: Layout) -> tuple[bytes, bytes]:
    """Return what stands in a head before the digest of the sums, and what stands behind it."""
    first, last = describe_runs(layout, run.kind, run.length, VERSION)
    place = (run.start, run.parent.hex().encode(), run.keys[-1].hex().encode())
    before = first + b',"start":"%d","parent":"%b","key":"%b","sums":"' % place
    since = b',"since":"%d"' % run.since if run.kind == "state" else b""
    after = b'"%b%b' % (since, last)
    size = len(before) + 2 * DIGEST + len(after)
    padding = -size % 8
    size += padding
    after += b" " * padding
    return size.to_bytes(8, "little") + before, after + run.tokens


@lru_cache(256)
def describe_runs(layout: Layout, kind: Kind, tokens: int, version: int) -> tuple[bytes, bytes]:
    """Return the beginning and the end of the headers of all runs of one kind and length."""
    about = {
        "rekindle_kv": str(version),
        "kind": kind,
        "identity": layout.identity,
        "grain": str(layout.block_size),
    }
    last = b""
    if kind == "draft":
        assert layout.draft is not None, "no draft, so its rows have no layout"
        last = b',"draft":' + encode_json(layout.draft.identity)
    at = tokens * TOKEN_BYTES
    tensors: dict[str, Any] = {"tokens": {"dtype": "I32", "shape": [tokens], "data_offsets": [0, at]}}
    for spec in layout.get_specs(kind, tokens):
        offsets = [at, at + spec.nbytes]
        tensors[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        at += spec.nbytes
    return b'{"__metadata__":%b' % encode_json(about)[:-1], b"%b},%b" % (last, encode_json(tensors)[1:])


def encode_json(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def split_frames(size: int) -> list[tuple[int, int]]:
    """Return the spans of the rows' bytes that are frames of their own."""
    return [(at, min(at + FRAME, size)) for at in range(0, size, FRAME)]


def encode_run(run: Run, layout: Layout, data: Buffer, codec: Compress) -> list[bytes]:
    """Return what to write, in order: the frame of the head, those of the rows, the seek table."""
    view = memoryview(data)
    spans = split_frames(len(memoryview(data)))
    rows = [codec.compress_rows(view[start:stop]) for start, stop in spans]
    first = encode_head(run, layout, digest_sums(sums for _, sums in rows))
    frames = [codec.compress(first), *(frame for frame, _ in rows)]
    sizes = [len(first), *(stop - start for start, stop in spans)]
    return [*frames, seekable.encode_table([(len(frame), size) for frame, size in zip(frames, sizes, strict=True)])]


def check_frames(frames: Sequence[Sizes], data: int) -> None:
    """Check that the frames are a head and then `data` bytes of tensors, cut as we cut them. Raises Damaged."""
    contents = [content for _, content in frames[1:]]
    # A few bytes of a table may claim terabytes, so frames are counted before they are listed.
    if len(contents) != -(-data // FRAME) or contents != [stop - start for start, stop in split_frames(data)]:
        raise Damaged("the frames' sizes are not those of these rows")


def parse_head(raw: Buffer) -> FileHead:
    """Parse the head of a file of any identity.

    Raises Damaged, Newer or Outdated.
    """
    try:
        size = int.from_bytes(raw[:8], "little")
        if size > min(len(raw) - 8, MAX_HEADER_BYTES):
            raise Damaged("the header goes beyond its frame")
        about = check_metadata(json.loads(bytes(raw[8 : 8 + size]))["__metadata__"])
        check_version(int(about["rekindle_kv"]))
        run = parse_run(about, bytes(raw[8 + size :]))
        identity = about["identity"]
        block_size = int(about["grain"])
        key = bytes.fromhex(about["key"])
        sums = bytes.fromhex(about["sums"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"the header cannot be read: {type(error).__name__}") from error
    if (
        not 1 <= block_size <= MAX_START
        or not 0 <= run.start <= MAX_START
        or len(run.parent) != KEY_BYTES
        or run.start % block_size
    ):
        raise Damaged("the header's numbers cannot be")
    blocks, rest = divmod(len(run.tokens), block_size * TOKEN_BYTES)
    if rest or not blocks or (run.kind == "state" and (blocks != 1 or not 0 <= run.since <= run.start)):
        raise Damaged("the tokens are not whole blocks")
    run = evolve(run, keys=compute_keys(run, block_size))
    if run.keys[-1] != key:
        raise Damaged("the tokens do not have the key that the header says")
    return FileHead(run, identity, block_size, sums)


def check_metadata(about: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the metadata of a file after a check that it consists of strings. Raises ValueError or AttributeError."""
    if not all(type(value) is str and value.isascii() and value.isprintable() for value in about.values()):
        raise ValueError("no plain strings")
    if len(about.get("identity", "")) > MAX_IDENTITY:
        raise ValueError("no identity is as long")
    return about


def check_version(version: int) -> None:
    """Raise Newer or Outdated unless this is the version of the format that we write."""
    if version > VERSION:
        raise Newer(f"format {version}")
    if version < VERSION:
        raise Outdated(f"format {version}")


def parse_run(about: Mapping[str, Any], tokens: bytes) -> Run:
    """Return the run without its keys. Only types are checked. Raises ValueError, KeyError or TypeError."""
    kind = about["kind"]
    if kind not in get_args(Kind):
        raise ValueError("of no kind")
    since = int(about["since"]) if kind == "state" else 0
    return Run(int(about["start"]), bytes.fromhex(about["parent"]), (), tokens, kind, since)


def compute_keys(run: Run, block_size: int) -> tuple[bytes, ...]:
    """Return the keys that the blocks of a run must have, or the key of a checkpoint."""
    if run.kind == "state":
        return (derive_checkpoint_key(run.parent),)
    return chain_keys(run.parent, run.tokens, block_size)

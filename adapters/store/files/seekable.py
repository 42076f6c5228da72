"""The zstd seekable format: independent frames, and a table of their sizes in a skippable frame.

The frame of a head carries zstd's checksum. Frames of rows carry none: the blocks of their content have sums of ours
(`block_sums.py`), which are quicker and longer.

https://github.com/facebook/zstd/blob/dev/contrib/seekable_format/zstd_seekable_compression_format.md
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import zstandard
from attrs import define

from adapters.store.files.block_sums import sum_blocks

SKIPPABLE = 0x184D2A5E
SEEKABLE = 0x8F92EAB1
MOST_FRAMES = 1 << 14  # with contents of 2 MiB each that is 32 GiB; only invented sizes are larger
CHECKSUM = 4  # bytes at the end of the frame of a head
HEAD = struct.Struct("<II")
ROW = struct.Struct("<II")
FOOT = struct.Struct("<IBI")

Buffer: TypeAlias = bytes | bytearray | memoryview
Sizes: TypeAlias = tuple[int, int]  # of one frame: compressed, content


class Damaged(Exception):
    """A file is not what it should be. The message says what is wrong."""


class Compress(Protocol):
    """Makes frames. Only one thread at a time may use it."""

    def compress(self, data: Buffer) -> bytes:
        """Return the frame of a head, with its checksum."""
        ...

    def compress_rows(self, data: Buffer) -> tuple[bytes, bytes]:
        """Return the frame of rows, and the sums of the blocks of its content."""
        ...


@define(eq=False)
class ZstdCompressor:
    """Makes frames with zstd. for_heads, for_rows: with a checksum, and without one."""

    for_heads: zstandard.ZstdCompressor
    for_rows: zstandard.ZstdCompressor

    def compress(self, data: Buffer) -> bytes:
        return self.for_heads.compress(data)

    def compress_rows(self, data: Buffer) -> tuple[bytes, bytes]:
        return self.for_rows.compress(data), sum_blocks(data)


def create_compressor(level: int) -> Compress:
    """Return a compressor whose frames carry their content's size."""
    return ZstdCompressor(
        zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True),
        zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True),
    )


def compute_table_size(frames: int) -> int:
    return HEAD.size + frames * ROW.size + FOOT.size


def encode_table(frames: Sequence[Sizes]) -> bytes:
    rows = b"".join(ROW.pack(*sizes) for sizes in frames)
    return HEAD.pack(SKIPPABLE, len(rows) + FOOT.size) + rows + FOOT.pack(len(frames), 0, SEEKABLE)


def parse_frame_count(footer: Buffer) -> int:
    """Return the number of frames from a file's last FOOT.size bytes. Raises Damaged."""
    count, flags, magic = FOOT.unpack(footer)
    if magic != SEEKABLE or flags:
        raise Damaged("no seek table at the end")
    if count > MOST_FRAMES:
        raise Damaged("it says that it has more frames than any file of ours")
    return int(count)


def parse_table(raw: Buffer, file_size: int) -> list[Sizes]:
    """Parse the table. Raises Damaged unless frames and table fill the file exactly and every frame's sizes are
    possible.
    """
    count = parse_frame_count(raw[-FOOT.size :])
    if len(raw) != compute_table_size(count) or HEAD.unpack(raw[: HEAD.size]) != (SKIPPABLE, len(raw) - HEAD.size):
        raise Damaged("the seek table's own size is wrong")
    frames = [(int(packed), int(content)) for packed, content in ROW.iter_unpack(raw[HEAD.size : -FOOT.size])]
    if sum(packed for packed, _ in frames) + len(raw) != file_size:
        raise Damaged("the frames do not fill the file")
    if any(not 0 < packed <= compute_bound(content) for packed, content in frames):
        raise Damaged("a frame's sizes cannot be")
    return frames


def compute_bound(content: int) -> int:
    """Return the most bytes that zstd needs for this many (ZSTD_compressBound, and a checksum)."""
    return content + (content >> 8) + 1024


class Decompressor(threading.local):
    """A decompressor for each thread: making one maps memory, which takes as long as some frames do."""

    def __init__(self) -> None:
        self.context = zstandard.ZstdDecompressor()


_decompressor = Decompressor()


def decompress(frame: Buffer, target: memoryview) -> None:
    """Fill `target` with the content of exactly one head's frame, checksum compared."""
    fill(frame, target, has_checksum=True)


def decompress_rows(frame: Buffer, target: memoryview) -> bytes:
    """Fill `target` with the content of exactly one frame of rows, and return the sums of its blocks."""
    fill(frame, target, has_checksum=False)
    return sum_blocks(target)


def fill(frame: Buffer, target: memoryview, *, has_checksum: bool) -> None:
    """Fill `target` with the content of exactly one frame. Releases the GIL while it works. Raises Damaged."""
    try:
        about = zstandard.get_frame_parameters(frame)
        if about.content_size != len(target) or about.has_checksum is not has_checksum or about.dict_id:
            raise Damaged("a frame's header is not ours")
        with _decompressor.context.stream_reader(frame) as reader:
            if reader.readinto(target) != len(target) or reader.read(1):
                raise Damaged("a frame has another length than it says")
    except zstandard.ZstdError as error:
        raise Damaged(f"a frame does not decompress: {error}") from error


def decompress_exactly(frame: bytes, size: int) -> bytes:
    """Return the content of exactly one frame, which says that it has this size. Raises Damaged."""
    try:
        if zstandard.get_frame_parameters(frame).content_size != size:
            raise Damaged("a frame's header is not ours")
        return _decompressor.context.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Damaged(f"a frame does not decompress: {error}") from error


def decompress_beginning(raw: Buffer, target: memoryview) -> None:
    """Fill `target` with the content of the first frame of `raw`; more may follow. Its checksum is not compared.

    At most as much as fits into `target` is decompressed. Raises Damaged.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(raw) as reader:
            if zstandard.get_frame_parameters(raw).content_size != len(target) or reader.readinto(target) != len(
                target
            ):
                raise Damaged("the first frame has another length than it says")
    except zstandard.ZstdError as error:
        raise Damaged(f"a frame does not decompress: {error}") from error

"""Makes and reads zstd frames whose content is not compressed, by the compiled library (frames.h) where there is one.

Any zstd decoder reads them. zstd's own encoder searches for matches at every level, and finds none in rows of numbers.
"""

from __future__ import annotations

from functools import lru_cache

from attrs import frozen

from adapters.store.files import seekable
from adapters.store.files.block_sums import SUM_BYTES, count_blocks
from adapters.store.files.frames_library import find_address, load_brief_functions, load_functions, make_bytes
from adapters.store.files.seekable import CHECKSUM, Buffer, Compress

# zstd's level that leaves rows as they are. It makes the frames where there is no library, and those of short contents,
# such as the ends of rows.
LEVEL = -5
SHORT = 64 << 10
MOST = (1 << 32) - 1  # bytes of a content, whose size a frame gives in four bytes
FRAME_HEAD = 9  # bytes: magic, descriptor, size of the content
BLOCK_HEAD = 3


@frozen(eq=False)
class PlainCompressor:
    """Leaves long rows as they are. Only one thread at a time may use it. short: compresses everything else."""

    short: Compress

    def compress(self, data: Buffer) -> bytes:
        return self.short.compress(data)

    def compress_rows(self, data: Buffer) -> tuple[bytes, bytes]:
        """Return the frame of rows and the sums of its blocks. The interpreter is free meanwhile."""
        is_long = SHORT <= memoryview(data).nbytes <= MOST
        return pack_rows(data) if is_long else self.short.compress_rows(data)


@lru_cache(256)
def count_frame_bytes(content: int) -> int:
    """Return the bytes of the plain frame of so many bytes of rows."""
    return FRAME_HEAD + content + BLOCK_HEAD * count_blocks(content)


def count_head_bytes(content: int) -> int:
    """Return the bytes of the plain frame of a head, which has a checksum."""
    return count_frame_bytes(content) + CHECKSUM


def pack_head(data: bytes) -> bytes:
    """Return the plain frame of a head. Requires the compiled library.

    The call keeps the GIL, since another thread might hold it for longer than the call takes.
    """
    compiled = load_brief_functions()
    assert compiled is not None, "callers have asked for it"
    frame = make_bytes(count_head_bytes(len(data)))
    compiled.rekindle_pack_head(find_address(data), len(data), find_address(frame))
    return frame


def pack_rows(data: Buffer) -> tuple[bytes, bytes]:
    """Return the plain frame of rows and the sums of its blocks. Requires the compiled library."""
    import numpy as np  # noqa: PLC0415 - who only looks at a folder need not wait for it

    compiled = load_functions()
    assert compiled is not None, "callers have asked for it"
    content = np.frombuffer(data, np.uint8)
    frame = make_bytes(count_frame_bytes(content.nbytes))
    sums = make_bytes(SUM_BYTES * count_blocks(content.nbytes))
    compiled.rekindle_pack_rows(content.ctypes.data, content.nbytes, find_address(frame), find_address(sums))
    return frame, sums


def create_plain_compressor() -> Compress:
    """Return a compressor that leaves rows as they are: the library's, or zstd's where there is none."""
    short = seekable.create_compressor(LEVEL)
    return short if load_functions() is None else PlainCompressor(short)


def read_plain_frames(descriptor: int, at: int, target: memoryview, frame: int) -> bytes | None:
    """Read neighbouring frames of a file straight to their places in `target`, which they fill.

    frame: bytes of their contents, a multiple of BLOCK_BYTES, and fewer of the last. Returns the sums of their blocks.
    None where this is not exactly what PlainCompressor makes, or cannot be read. Then the target may hold anything, and
    another decoder has to say what is wrong.
    """
    import numpy as np  # noqa: PLC0415 - who only looks at a folder need not wait for it

    compiled = load_functions()
    if compiled is None:
        return None
    place = np.frombuffer(target, np.uint8)
    sums = np.empty(SUM_BYTES * count_blocks(place.nbytes), np.uint8)
    failed = compiled.rekindle_read_frames(descriptor, at, place.ctypes.data, place.nbytes, frame, sums.ctypes.data)
    return None if failed else sums.tobytes()

"""Makes and reads zstd frames whose content is not compressed, by the compiled library (frames.h) where there is one.

Any zstd decoder reads them. zstd's own encoder searches for matches at every level, and finds none in rows of numbers.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

from attrs import frozen

from adapters.store.files import seekable
from adapters.store.files.seekable import Buffer, Compress

# zstd's level that leaves rows as they are. It makes the frames where there is no library, and those of short contents:
# they are heads, whose text becomes smaller.
LEVEL = -5
SHORT = 64 << 10
MOST = (1 << 32) - 1  # bytes of a content, whose size a frame gives in four bytes


@frozen(eq=False)
class PlainCompressor:
    """Makes frames that carry their content's size and checksum. Only one thread at a time may use it.

    short: compresses short contents.
    """

    short: Compress

    def compress(self, data: Buffer) -> bytes:
        """Return the frame of a content. The interpreter is free while it is made."""
        return pack_frame(data) if SHORT <= memoryview(data).nbytes <= MOST else self.short.compress(data)


@lru_cache(256)
def count_frame_bytes(content: int) -> int:
    """Return the bytes of the plain frame of so many bytes. There is a compiled library."""
    compiled = load_functions()
    assert compiled is not None, "callers have asked for it"
    return int(compiled.rekindle_frame_bytes(content))


def pack_short_frame(data: bytes) -> bytes:
    """Return the plain frame of a short content, which is not empty. There is a compiled library.

    The interpreter is kept, since another thread might take it for longer than this takes.
    """
    compiled = load_brief_functions()
    assert compiled is not None, "callers have asked for it"
    frame = make_bytes(count_frame_bytes(len(data)))
    compiled.rekindle_pack_frame(find_address(data), len(data), find_address(frame))
    return frame


def pack_frame(data: Buffer) -> bytes:
    """Return the plain frame of a content. The interpreter is free while it is made. There is a compiled library."""
    import numpy as np  # noqa: PLC0415 - who only looks at a folder need not wait for it

    compiled = load_functions()
    assert compiled is not None, "callers have asked for it"
    content = np.frombuffer(data, np.uint8)
    frame = make_bytes(compiled.rekindle_frame_bytes(content.nbytes))
    compiled.rekindle_pack_frame(content.ctypes.data, content.nbytes, find_address(frame))
    return frame


def create_plain_compressor() -> Compress:
    """Return a compressor of plain frames: the library's, or zstd's where there is none."""
    short = seekable.create_compressor(LEVEL)
    return short if load_functions() is None else PlainCompressor(short)


def read_plain_frames(descriptor: int, at: int, target: memoryview, frame: int) -> bytes | None:
    """Read neighbouring frames of a file straight to their places in `target`, which they fill.

    frame: bytes of their contents, fewer of the last. Returns their checksums, compared. None where this is not exactly
    what PlainCompressor makes, or cannot be read. Then the target may hold anything, and another decoder has to say
    what is wrong.
    """
    import numpy as np  # noqa: PLC0415 - who only looks at a folder need not wait for it

    compiled = load_functions()
    if compiled is None:
        return None
    place = np.frombuffer(target, np.uint8)
    sums = np.empty(-(-place.nbytes // frame), "<u4")
    failed = compiled.rekindle_read_frames(descriptor, at, place.ctypes.data, place.nbytes, frame, sums.ctypes.data)
    return None if failed else sums.tobytes()


@cache
def load_functions() -> ctypes.CDLL | None:
    from adapters.models.kernels.cpu.native.native_library import find_library  # noqa: PLC0415 - readers need none

    library = find_library()
    return None if library is None else library.code


@cache
def load_brief_functions() -> ctypes.PyDLL | None:
    from adapters.models.kernels.cpu.native.native_library import find_library  # noqa: PLC0415 - readers need none

    library = find_library()
    return None if library is None else library.brief


def make_bytes(size: int) -> bytes:
    """Return bytes whose content is not set yet. CPython allows that until other code has a reference to them."""
    make = ctypes.pythonapi.PyBytes_FromStringAndSize
    make.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]
    make.restype = ctypes.py_object
    made: bytes = make(None, size)
    return made


def find_address(made: bytes) -> int:
    find = ctypes.pythonapi.PyBytes_AsString
    find.argtypes = [ctypes.py_object]
    find.restype = ctypes.c_void_p
    address: int = find(made)
    return address

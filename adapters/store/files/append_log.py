"""Records in a file that is only appended to: `length | CRC-32 | body`, little-endian. A torn tail is not read."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from zlib import crc32

FRAME = struct.Struct("<II")


def frame_record(body: bytes) -> bytes:
    return FRAME.pack(len(body), crc32(body)) + body


def parse_records(raw: bytes, at: int) -> Iterator[tuple[bytes, int]]:
    """Yield (body, end of its record) for the records from `at` on, up to the first one that is damaged or torn."""
    while at + FRAME.size <= len(raw):
        length, check = FRAME.unpack_from(raw, at)
        begin = at + FRAME.size
        at = at + FRAME.size + length
        if at > len(raw):
            return
        body = raw[begin:at]
        if crc32(body) != check:
            return
        yield body, at

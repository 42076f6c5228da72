"""Frames: the bytes that a server and a daemon exchange; `docs/SHARD_PROTOCOL.md` describes them.

The head of a frame has the lengths of its parts, so a reader always finds its end. Bytes that are no frame raise
`Malformed`. Then the beginning of the next frame cannot be found either, and the connection has to be closed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

from attrs import frozen

MAGIC = b"RKSH"
VERSION = 2
# magic, version, op, flags, request, bytes of arguments, bytes of payload, checksum. The checksum covers the fields
# before it, the arguments, and the payload if it follows over the connection.
HEAD = struct.Struct("<4sHBBIIQI")
SUMMED = HEAD.size - 4
MOST_ARGUMENTS = 1 << 20  # bytes; a step of 4,096 segments takes a tenth of it, a probe's outcome a hundredth
MOST_PAYLOAD = 1 << 16  # bytes, until both ends know the model; the handshake has no payload
LARGEST = 1 << 36  # bytes of a payload for any model: 64 GiB, so that sums of sizes stay within 64 bits

# REPLY: the frame is an answer. FAILED: the answer is a failure. SHARED: the payload is in shared memory.
REPLY = 1
FAILED = 2
SHARED = 4
FLAGS = REPLY | FAILED | SHARED


class Malformed(ValueError):
    """Bytes that are no frame of this protocol."""


@frozen
class FrameHead:
    """The head of a frame. arguments, payload: lengths in bytes. checksum: as it was received."""

    op: int
    flags: int
    request: int
    arguments: int
    payload: int
    checksum: int = 0

    @property
    def follows(self) -> int:
        """The number of payload bytes that come over the connection itself."""
        return 0 if self.flags & SHARED else self.payload


def write_frame(head: FrameHead, arguments: bytes, payload: Iterable[memoryview] = ()) -> bytes:
    """Return the head as bytes. payload: the pieces that follow over the connection, in order."""
    bare = HEAD.pack(MAGIC, VERSION, head.op, head.flags, head.request, head.arguments, head.payload, 0)
    return bare[:SUMMED] + checksum(bare, arguments, payload).to_bytes(4, "little")


def read(data: bytes | bytearray | memoryview, most_payload: int) -> FrameHead:
    """Read a head. Raises Malformed for bytes that are no head, and for lengths that are not accepted.

    It is called before memory is allocated for the arguments and the payload.
    """
    if len(data) != HEAD.size:
        raise Malformed(f"a head of {len(data)} bytes; all have {HEAD.size}")
    magic, version, op, flags, request, arguments, payload, summed = HEAD.unpack(data)
    if magic != MAGIC:
        raise Malformed("what came does not begin as a frame does")
    if version != VERSION:
        raise Malformed(f"a frame of version {version} of the protocol; accepted: {VERSION}")
    if flags & ~FLAGS or (flags & FAILED and not flags & REPLY):
        raise Malformed(f"a frame with flags {flags:#x}")
    if arguments > MOST_ARGUMENTS:
        raise Malformed(f"{arguments} bytes of arguments; accepted: at most {MOST_ARGUMENTS}")
    if payload > most_payload:
        raise Malformed(f"{payload} bytes of payload; accepted now: at most {most_payload}")
    return FrameHead(op, flags, request, arguments, payload, summed)


def check(head: FrameHead, data: bytes | bytearray, arguments: bytes | bytearray, payload: memoryview) -> None:
    """Compare the checksum. Raises Malformed if the frame was changed on its way.

    data: the head as bytes. payload: the part that came over the connection.
    """
    if checksum(data, arguments, (payload,)) != head.checksum:
        raise Malformed("a frame whose checksum does not hold")


def checksum(head: bytes | bytearray, arguments: bytes | bytearray, payload: Iterable[memoryview]) -> int:
    """Return the CRC-32 of the head without its last field, the arguments and the payload."""
    found = zlib.crc32(arguments, zlib.crc32(head[:SUMMED]))
    for piece in payload:
        found = zlib.crc32(piece, found)
    return found

"""Frames: what the ends of a connection to a shard say to each other, as bytes; see `docs/SHARD_PROTOCOL.md`.

A frame says how long it is before anything else, so whoever reads it can always find its end. What is no frame is
Malformed, and then nobody knows where the next one begins: the connection is of no use any more.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

from attrs import frozen

MAGIC = b"RKSH"
VERSION = 2
# magic, version, op, flags, request, bytes of arguments, bytes of payload, checksum of all of these, the arguments, and
# the payload where it follows
HEAD = struct.Struct("<4sHBBIIQI")
SUMMED = HEAD.size - 4
MOST_ARGUMENTS = 1 << 20  # a step of 4,096 segments takes a tenth of it, a probe's outcome a hundredth
MOST_PAYLOAD = 1 << 16  # until both ends know the model: hellos have none
LARGEST = 1 << 36  # of any model: 64 GiB, so that nobody's arithmetic leaves 64 bits

# flags: an answer; one that says why not; the payload is in shared memory
REPLY = 1
FAILED = 2
SHARED = 4
FLAGS = REPLY | FAILED | SHARED


class Malformed(ValueError):
    """These bytes are no frame of ours."""


@frozen
class FrameHead:
    """arguments, payload: lengths in bytes. checksum: as it was written."""

    op: int
    flags: int
    request: int
    arguments: int
    payload: int
    checksum: int = 0

    @property
    def follows(self) -> int:
        """Bytes of the payload that come over the connection itself."""
        return 0 if self.flags & SHARED else self.payload


def write_frame(head: FrameHead, arguments: bytes, payload: Iterable[memoryview] = ()) -> bytes:
    """The head's bytes. payload: what follows over the connection, in order."""
    bare = HEAD.pack(MAGIC, VERSION, head.op, head.flags, head.request, head.arguments, head.payload, 0)
    return bare[:SUMMED] + checksum(bare, arguments, payload).to_bytes(4, "little")


def read(data: bytes | bytearray | memoryview, most_payload: int) -> FrameHead:
    """Raises Malformed for what is no head, or says more than is accepted: before anything is made room for."""
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
    """Raises Malformed where something was changed on its way. data: the head's bytes; payload: what followed."""
    if checksum(data, arguments, (payload,)) != head.checksum:
        raise Malformed("a frame whose checksum does not hold")


def checksum(head: bytes | bytearray, arguments: bytes | bytearray, payload: Iterable[memoryview]) -> int:
    found = zlib.crc32(arguments, zlib.crc32(head[:SUMMED]))
    for piece in payload:
        found = zlib.crc32(piece, found)
    return found

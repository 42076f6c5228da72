"""The disk index in one file that is read at once. It may always be lost: the files say the same, only slower.

Records `length | CRC-32 | body`; the body of a run that came: `+`, handle, start, size, hits, used, number of
blocks, origin, parent, keys, tokens; of one that left: `-`, handle; of one that was found: `!`, handle, hits, used.
What follows a record that does not check is not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from zlib import crc32

from attrs import frozen

from adapters.store.blocks import KEY, WIDTH
from adapters.store.index import Entry

NAME = "journal"
MAGIC = b"rekindle-journal-1\n"
FRAME = struct.Struct("<II")
CAME = struct.Struct("<cQIQQQI")
LEFT = struct.Struct("<cQ")
FOUND = struct.Struct("<cQQQ")


def came(entry: Entry) -> bytes:
    fixed = CAME.pack(b"+", entry.handle, entry.start, entry.size, entry.hits, entry.used, len(entry.keys))
    return framed(fixed + entry.origin + entry.parent + b"".join(entry.keys) + entry.tokens)


def left(entry: Entry) -> bytes:
    return framed(LEFT.pack(b"-", entry.handle))


def found(entry: Entry) -> bytes:
    return framed(FOUND.pack(b"!", entry.handle, entry.hits, entry.used))


def framed(body: bytes) -> bytes:
    return FRAME.pack(len(body), crc32(body)) + body


def snapshot(entries: Iterable[Entry]) -> Iterable[bytes]:
    """A whole journal that says: these."""
    yield MAGIC
    yield from map(came, entries)


@frozen
class Kept:
    """What a journal says. whole: it ended with a record's end. records: how many it took to say it."""

    entries: dict[int, Entry]
    whole: bool
    records: int


def read(raw: bytes) -> Kept:
    entries: dict[int, Entry] = {}
    at, records = len(MAGIC), 0
    if raw[:at] != MAGIC:
        return Kept(entries, whole=False, records=0)
    view = memoryview(raw)
    while at + FRAME.size <= len(raw):
        length, check = FRAME.unpack_from(raw, at)
        body = view[at + FRAME.size : at + FRAME.size + length]
        if len(body) != length or crc32(body) != check or not replay(entries, body):
            break
        at, records = at + FRAME.size + length, records + 1
    return Kept(entries, at == len(raw), records)


def replay(entries: dict[int, Entry], body: memoryview) -> bool:
    """False if the record cannot be: it was written by somebody else."""
    try:
        kind = bytes(body[:1])
        if kind == b"+":
            entry = parse_came(body)
            entries[entry.handle] = entry
        elif kind == b"-":
            entries.pop(LEFT.unpack(body)[1], None)
        else:
            _, handle, hits, used = FOUND.unpack(body)
            if handle in entries:
                entries[handle].hits, entries[handle].used = hits, used
    except (struct.error, ValueError):
        return False
    return True


def parse_came(body: memoryview) -> Entry:
    _, handle, start, size, hits, used, count = CAME.unpack_from(body)
    rest = bytes(body[CAME.size :])
    names, tokens = rest[: KEY * (2 + count)], rest[KEY * (2 + count) :]
    if not count or len(names) != KEY * (2 + count) or not tokens or len(tokens) % (count * WIDTH):
        raise ValueError("a run's sizes do not agree")
    origin, parent, *keys = (names[at : at + KEY] for at in range(0, len(names), KEY))
    return Entry(handle, start, parent, tuple(keys), tokens, size, origin, hits, used)

"""The disk index in one file that is read at once. It may always be lost: the files say the same, only slower.

The body of a record of a run that came: `+`, handle, start, size, hits, used, number of blocks, kind (its first
letter), since, origin, parent, keys, tokens; of one that left: `-`, handle; of one that was found: `!`, handle, hits,
used. What follows a record that does not check is not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import get_args

from attrs import frozen

from adapters.store.block_index import Entry
from adapters.store.block_keys import KEY, WIDTH
from adapters.store.files.append_log import framed, records
from adapters.store.files.file_format import MOST_HANDLE, Kind

NAME = "journal"
ANY = b"rekindle-journal-"  # what every version begins with
MOST = 1 << 30  # bytes
LOOK = 512  # bytes that tell whether it is ours: a disk writes so many at once, so a power cut leaves all or none
MAGIC = b"rekindle-journal-3\n"
CAME = struct.Struct("<cQIQQQIcI")
LEFT = struct.Struct("<cQ")
FOUND = struct.Struct("<cQQQ")
KINDS: dict[bytes, Kind] = {kind[:1].encode(): kind for kind in get_args(Kind)}


def may_be_ours(beginning: bytes) -> bool:
    """Of a journal's first LOOK bytes. A power cut may leave zeros of them, or some and zeros, whatever follows."""
    return beginning.startswith(ANY) or (bool(beginning) and ANY.startswith(beginning.rstrip(b"\0")))


def came(entry: Entry) -> bytes:
    numbers = (entry.handle, entry.start, entry.size, entry.hits, entry.used, len(entry.keys))
    fixed = CAME.pack(b"+", *numbers, entry.kind[:1].encode(), entry.since)
    return framed(fixed + entry.origin + entry.parent + b"".join(entry.keys) + entry.tokens)


def left(entry: Entry) -> bytes:
    return framed(LEFT.pack(b"-", entry.handle))


def found(entry: Entry) -> bytes:
    return framed(FOUND.pack(b"!", entry.handle, entry.hits, entry.used))


def snapshot(entries: Iterable[Entry]) -> Iterable[bytes]:
    """A whole journal that says: these."""
    yield MAGIC
    yield from map(came, entries)


@frozen
class Replayed:
    """What a journal says. whole: it ended with a record's end. records: how many it took to say it."""

    entries: dict[int, Entry]
    whole: bool
    records: int


def read(raw: bytes) -> Replayed:
    entries: dict[int, Entry] = {}
    at, count = len(MAGIC), 0
    if raw[:at] != MAGIC:
        return Replayed(entries, whole=False, records=0)
    for body, end in records(raw, at):
        if not replay(entries, body):
            break
        at, count = end, count + 1
    return Replayed(entries, at == len(raw), count)


def replay(entries: dict[int, Entry], body: bytes) -> bool:
    """False if the record cannot be: it was written by somebody else."""
    try:
        kind = body[:1]
        if kind == b"+":
            entry = parse_came(body)
            entries[entry.handle] = entry
        elif kind == b"-":
            entries.pop(LEFT.unpack(body)[1], None)
        else:
            _, handle, hits, used = FOUND.unpack(body)
            if max(hits, used) > MOST_HANDLE:
                return False
            if handle in entries:
                entries[handle].hits, entries[handle].used = hits, used
    except (struct.error, ValueError, KeyError):
        return False
    return True


def parse_came(body: bytes) -> Entry:
    """A start waits for thousands of these, so all names are cut out at once, and no block is looked at alone."""
    _, handle, start, size, hits, used, count, kind, since = CAME.unpack_from(body)
    at = CAME.size + KEY * (2 + count)
    if not count or at >= len(body) or (len(body) - at) % (count * WIDTH):
        raise ValueError("a run's sizes do not agree")
    if handle > MOST_HANDLE or hits > MOST_HANDLE or used > MOST_HANDLE:
        raise ValueError("numbers that no turn has reached")
    names = struct.unpack_from(f"{KEY}s" * (2 + count), body, CAME.size)
    return Entry(handle, start, names[1], names[2:], body[at:], size, names[0], hits, used, 0, 0, KINDS[kind], since)

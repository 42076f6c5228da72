"""Encodes the disk index as a journal, which is read at once at the start.

The journal may always be lost: the files hold the same facts, and only take longer to read. The body of a record is one
of these:
* An added run: `+`, handle, start, size, hits, used, number of blocks, kind (its first letter), since, origin, parent,
  keys, tokens.
* A removed run: `-`, handle.
* A run that was found: `!`, handle, hits, used.

Nothing after a damaged record is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import get_args

from attrs import frozen

from adapters.store.block_index import Entry
from adapters.store.block_keys import KEY_BYTES, TOKEN_BYTES
from adapters.store.files.append_log import frame_record, parse_records
from adapters.store.files.file_format import MAX_HANDLE, Kind

NAME = "journal"
ANY_MAGIC = b"rekindle-journal-"  # the beginning of every version
MAX_BYTES = 1 << 30  # bytes
# Bytes that tell whether it is ours: a disk writes this many at once, so a power cut leaves all or none.
MAGIC_BYTES = 512
MAGIC = b"rekindle-journal-4\n"
ADDITION = struct.Struct("<cQIQQQIcI")
REMOVAL = struct.Struct("<cQ")
HIT = struct.Struct("<cQQQ")
KINDS: dict[bytes, Kind] = {kind[:1].encode(): kind for kind in get_args(Kind)}


def may_be_journal(beginning: bytes) -> bool:
    """Say whether a journal of ours may begin with these MAGIC_BYTES bytes.

    A power cut may leave zeros of them, or some and zeros, whatever follows.
    """
    return beginning.startswith(ANY_MAGIC) or (bool(beginning) and ANY_MAGIC.startswith(beginning.rstrip(b"\0")))


def encode_addition(entry: Entry) -> bytes:
    """Return the record of an added run."""
    numbers = (entry.handle, entry.start, entry.size, entry.hits, entry.last_turn, len(entry.keys))
    fixed = ADDITION.pack(b"+", *numbers, entry.kind[:1].encode(), entry.since)
    return frame_record(fixed + entry.origin + entry.parent + b"".join(entry.keys) + entry.tokens)


def encode_removal(entry: Entry) -> bytes:
    """Return the record of a removed run."""
    return frame_record(REMOVAL.pack(b"-", entry.handle))


def encode_hit(entry: Entry) -> bytes:
    """Return the record of a run that was found."""
    return frame_record(HIT.pack(b"!", entry.handle, entry.hits, entry.last_turn))


def encode_snapshot(entries: Iterable[Entry]) -> Iterable[bytes]:
    """Return a whole journal with these entries."""
    yield MAGIC
    yield from map(encode_addition, entries)


@frozen
class JournalContents:
    """The entries of a journal. whole: it ended with a whole record. records: how many it has."""

    entries: dict[int, Entry]
    whole: bool
    records: int


def parse_journal(raw: bytes) -> JournalContents:
    """Apply the records of a journal in order, up to the first damaged one."""
    entries: dict[int, Entry] = {}
    at = len(MAGIC)
    count = 0
    if raw[:at] != MAGIC:
        return JournalContents(entries, whole=False, records=0)
    for body, end in parse_records(raw, at):
        if not apply_record(entries, body):
            break
        at = end
        count = count + 1
    return JournalContents(entries, at == len(raw), count)


def apply_record(entries: dict[int, Entry], body: bytes) -> bool:
    """Apply one record. Return False if no version of ours writes such a record."""
    try:
        kind = body[:1]
        if kind == b"+":
            entry = parse_addition(body)
            entries[entry.handle] = entry
        elif kind == b"-":
            entries.pop(REMOVAL.unpack(body)[1], None)
        else:
            _, handle, hits, used = HIT.unpack(body)
            if max(hits, used) > MAX_HANDLE:
                return False
            if handle in entries:
                entries[handle].hits = hits
                entries[handle].last_turn = used
    except (struct.error, ValueError, KeyError):
        return False
    return True


def parse_addition(body: bytes) -> Entry:
    """Parse the record of an added run.

    A server reads thousands of records at its start, so all keys of one are cut out at once. Raises ValueError or
    struct.error if it is malformed.
    """
    _, handle, start, size, hits, used, count, kind, since = ADDITION.unpack_from(body)
    at = ADDITION.size + KEY_BYTES * (2 + count)
    if not count or at >= len(body) or (len(body) - at) % (count * TOKEN_BYTES):
        raise ValueError("a run's sizes do not agree")
    if handle > MAX_HANDLE or hits > MAX_HANDLE or used > MAX_HANDLE:
        raise ValueError("numbers that no turn has reached")
    names = struct.unpack_from(f"{KEY_BYTES}s" * (2 + count), body, ADDITION.size)
    return Entry(handle, start, names[1], names[2:], body[at:], size, names[0], hits, used, 0, 0, KINDS[kind], since)

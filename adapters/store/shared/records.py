"""Encodes and parses the small objects by which servers agree on what is removed. They are foreign input."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from adapters.store.shared.garbage_policy import MAX_MARKED, Mark, ServerReport
from adapters.store.shared.object_names import parse_mark_name, parse_run_name

MAX_RECORD_BYTES = 1 << 20
MAX_NAMES = 64 * MAX_MARKED
T = TypeVar("T")


class MarkRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mark as it is written."""

    runs: tuple[str, ...]


class ReportRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A report as it is written. number: differs in every report, so that a listing shows that there is a new one."""

    number: int
    seen: tuple[str, ...]
    keeps: tuple[str, ...]


def encode_mark(runs: tuple[str, ...]) -> bytes:
    return msgspec.json.encode(MarkRecord(runs))


def parse_mark(name: str, raw: bytes) -> Mark:
    """Return a mark. Raises ValueError if it is none."""
    owner = parse_mark_name(name)
    found = decode_record(raw, MarkRecord)
    if not owner or len(found.runs) > MAX_MARKED or any(parse_run_name(run) is None for run in found.runs):
        raise ValueError("not a mark of this version")
    return Mark(name, owner, frozenset(found.runs))


def encode_report(number: int, seen: frozenset[str], keeps: frozenset[str]) -> bytes:
    return msgspec.json.encode(ReportRecord(number, tuple(sorted(seen)), tuple(sorted(keeps))))


def parse_report(server: str, raw: bytes) -> ServerReport:
    """Return a report. Raises ValueError if it is none."""
    found = decode_record(raw, ReportRecord)
    if len(found.seen) + len(found.keeps) > MAX_NAMES:
        raise ValueError("longer than any report of this version")
    return ServerReport(server, frozenset(found.seen), frozenset(found.keeps))


def decode_record(raw: bytes, kind: type[T]) -> T:
    """Parse one record. Raises ValueError."""
    if len(raw) > MAX_RECORD_BYTES:
        raise ValueError("larger than any record")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error

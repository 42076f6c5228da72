"""A trace: everything that happened, in order, from which everything that was decided can be derived again.

The format is JSON Lines, compressed with zstd if the name ends in `.zst`. First comes a header. Then comes every event
(`Envelope`), followed by what it asked for (`EffectRequest`, `Launch`). A `Digest` of the world follows every 64
events, and one stands at the end. `engine/core/replay.py` checks a trace, and docs/TRACE.md shows one.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, get_args, get_origin

import attrs
import zstandard
from attrs import define, field, frozen
from cattrs import BaseValidationError, Converter
from cattrs.errors import ForbiddenExtraKeysError, StructureHandlerNotFoundError
from cattrs.preconf.json import make_converter
from cattrs.strategies import configure_tagged_union

from adapters import bounded_json
from adapters.watched_thread import WatchedThread
from effects.all import Effect, EffectRequest, Launch, Outcome
from engine.core.event_loop import Envelope
from engine.core.redact import Redactor
from engine.core.timed_steps import register_timed_steps
from states.events import Common, Event, Happened
from states.settings import Settings
from states.world import Output, World, make_world

log = logging.getLogger("rekindle.trace")

VERSION = 30
DIGEST_EVERY = 64  # events
# Characters of one line. The longest context has 2**21 tokens, and each takes 14 characters in a redacted trace.
LINE_LIMIT = 32 << 20
# Lists and objects in one line. An event loop that is late takes several steps as one event. 16 steps of 64 requests,
# with 20 alternatives for each token, take some 23,000 lists and objects.
MOST_PARTS = 1 << 16
# Events that may wait to be written: a minute of 250 a second. With what they led to they take some 2 KiB each, which
# is 32 MiB, without the prompts, which the requests share. One in DIGEST_EVERY brings its world along, which is mostly
# the tokens of the slots, a MiB where they are long: 256 MiB in all. A disk slower than that ends the trace.
BACKLOG = 1 << 14


# The exceptions that parsers, converters and constructors raise for impossible values.
UNREADABLE = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    *(BaseValidationError, ForbiddenExtraKeysError, StructureHandlerNotFoundError),
)


@frozen
class Digest:
    """The digest of the world after event `seq`. `last` marks the end: a trace without it was cut short."""

    seq: int
    world: str
    last: bool = False


@frozen
class Header:
    """The first line of a trace. trace: the version of the format."""

    trace: int
    engine: str
    settings: Settings
    identity: str  # of the model: weights, configuration, numerics
    config: Mapping[str, Any]  # the options that it was served with, without secrets
    redacted: bool = False


Record: TypeAlias = Envelope | EffectRequest | Launch | Digest


class BadTrace(Exception):
    """The file is not a trace that this version can read; the message names the line."""


class LineCutShort(BadTrace):
    """The last line has no end: the server was killed while it wrote the line, or it writes it now."""


@cache
def converter() -> Converter:
    """Return the converter of records, built at its first use: a server without a trace does not wait for it."""
    # It does not list everything that is wrong: a line of millions of wrong tokens would become as many exceptions.
    built = make_converter(forbid_extra_keys=True, detailed_validation=False)
    built.register_structure_hook_func(is_literal, structure_literal)
    register_timed_steps(built)
    for union in (
        Outcome,
        Event,
        Common,
        Happened,
        Effect,
        Record,
    ):  # inner unions first: hooks are bound when configured
        configure_tagged_union(union, built, tag_name="is")
    return built


def is_literal(kind: Any) -> bool:
    """Return whether a type is a `Literal`."""
    origin: Any = get_origin(kind)
    return origin is Literal


def structure_literal(value: Any, kind: Any) -> Any:
    """Structure a Literal as cattrs does, but raise ValueError where cattrs raises a bare Exception."""
    if value not in get_args(kind):
        raise ValueError(f"{str(value)[:40]!r} is none of {', '.join(map(repr, get_args(kind)))}")
    return value


def encode(record: Record) -> str:
    """Return the line of a record."""
    return json.dumps(converter().unstructure(record, unstructure_as=Record), separators=(",", ":"))


def digest(world: World) -> str:
    """Return 128 bits over every value of the world, in order, as hex."""
    hasher = blake2b(digest_size=16)
    stack: list[Any] = [world]
    while stack:
        value = stack.pop()
        if attrs.has(type(value)):
            hasher.update(type(value).__name__.encode() + b"(")
            stack += [getattr(value, name.name) for name in attrs.fields(type(value))]
        elif isinstance(value, Mapping):
            hasher.update(b"{%d" % len(value))
            stack += [part for item in value.items() for part in item]
        elif isinstance(value, tuple) and not all(type(item) is int for item in value):
            hasher.update(b"[%d" % len(value))
            stack += value
        else:
            # Of a named tuple the values count, as of any other, and not its name.
            written = tuple.__repr__(value) if isinstance(value, tuple) else repr(value)
            hasher.update(written.encode() + b",")
    return hasher.hexdigest()


def open_trace(path: Path, mode: str) -> IO[Any]:
    """Open a text file, or one inside zstd.

    Reading continues across zstd frames, and its memory is bounded. A file that is written is readable by its owner
    only, since prompts are in it.
    """
    raw = open(path, mode + "b", opener=open_private if mode == "w" else None)  # noqa: SIM115 - Path has no opener
    if path.suffix != ".zst":
        return io.TextIOWrapper(raw, encoding="utf-8", newline="\n")
    if mode == "w":
        packed = zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(raw)
        return io.TextIOWrapper(packed, encoding="utf-8", newline="\n")
    unpacked = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(raw, read_across_frames=True)
    return io.TextIOWrapper(unpacked, encoding="utf-8", newline="\n")


def open_private(path: str, flags: int) -> int:
    """Open a file that only its owner may read, even if it existed before and others could read it."""
    descriptor = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        with suppress(OSError):  # another's file, or a file system without rights
            os.fchmod(descriptor, 0o600)
    return descriptor


@define
class Recorder:
    """Writes a trace on a thread of its own. The engine only hands over frozen values."""

    path: Path
    header: Header
    failure: str = ""  # why the trace ended early
    _backlog: queue.Queue[tuple[Envelope, tuple[Output, ...], World | None] | None] = field(init=False)
    _world: World = field(init=False)  # after the last event that was handed over
    _thread: WatchedThread = field(init=False)
    _file: IO[str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._backlog = queue.Queue(BACKLOG)
        self._world = make_world(self.header.settings)
        self._thread = WatchedThread("trace", self._write, died=self._on_thread_death)

    def start(self) -> None:
        """Write the header and start the thread. Raises OSError if the file cannot be written."""
        self._file = open_trace(self.path, "w")
        self._file.write(json.dumps(converter().unstructure(self.header), separators=(",", ":")) + "\n")
        self._file.flush()  # so that the trace of a server that is killed at once has a header
        self._thread.start()

    def record(self, envelope: Envelope, outs: tuple[Output, ...], world: World) -> None:
        """Queue an event and what it asked for. If the queue is full, the trace ends early."""
        if self.failure:
            return
        try:
            self._backlog.put_nowait((envelope, outs, world if has_digest(envelope.seq) else None))
            self._world = world
        except queue.Full:
            self._end_early("the disk is too slow for it")

    def close(self) -> None:
        """Wait until everything is written."""
        while self._thread.is_alive():
            with suppress(queue.Full):  # a thread that dies now takes nothing out of it any more
                self._backlog.put(None, timeout=0.1)
                break
        self._thread.join()

    def _end_early(self, why: str) -> None:
        self.failure = why
        log.error("the trace %s ends early: %s", self.path, why)

    def _on_thread_death(self) -> None:
        self._end_early(self._thread.trouble)
        self._discard_backlog()

    def _discard_backlog(self) -> None:
        """Close the file and drop what waits to be written, which is large."""
        with suppress(OSError, ValueError):
            self._file.close()
        with suppress(queue.Empty):
            while True:
                self._backlog.get_nowait()

    def _write(self) -> None:
        redactor = Redactor(make_world(self.header.settings)) if self.header.redacted else None
        seq = -1
        try:
            while (item := self._backlog.get()) is not None:
                envelope, outs, world = item
                if redactor is not None:
                    envelope, outs, world = redactor.redact_envelope(envelope)
                seq = envelope.seq
                lines = [encode(envelope), *map(encode, outs)]
                if has_digest(seq) and world is not None:
                    lines.append(encode(Digest(seq, digest(world))))
                self._file.write("\n".join(lines) + "\n")
                if self._backlog.empty():
                    self._file.flush()
            if not self.failure:
                last = self._world if redactor is None else redactor.world
                self._file.write(encode(Digest(seq, digest(last), last=True)) + "\n")
            self._file.close()
        except OSError as error:
            self._end_early(str(error))
            self._discard_backlog()


def has_digest(seq: int) -> bool:
    """Return whether the world's digest is written after this event."""
    return seq % DIGEST_EVERY == DIGEST_EVERY - 1


@frozen
class TraceLine:
    """A line of a trace. size: in characters."""

    number: int
    record: Record
    size: int


def read_trace(path: Path) -> tuple[Header, Iterator[tuple[int, Record]]]:
    """Return the header, and every record with its line number. Raises BadTrace for whatever is wrong."""
    header, lines = read_trace_lines(path)
    return header, ((line.number, line.record) for line in lines)


def read_trace_lines(path: Path) -> tuple[Header, Iterator[TraceLine]]:
    """Return the header, and every line. Raises BadTrace for whatever is wrong: a trace is hostile input."""
    lines = read_lines(path)
    number, first = next(lines, (1, ""))
    try:
        raw = bounded_json.loads(first, MOST_PARTS)
        version = raw.get("trace") if isinstance(raw, dict) else None
        header = converter().structure(raw, Header) if version == VERSION else None
    except UNREADABLE as error:
        raise BadTrace(f"{path}: line {number} is no trace header: {summarize_error(error)}") from error
    if header is None:
        raise BadTrace(f"{path}: line 1 is no trace header of version {VERSION} (found {str(version)[:40]!r})")
    return header, (TraceLine(number, parse_record(path, number, line), len(line)) for number, line in lines)


def parse_record(path: Path, number: int, line: str) -> Record:
    """Parse one line. Raises BadTrace."""
    kind: Any = Record
    try:
        record: Record = converter().structure(bounded_json.loads(line, MOST_PARTS), kind)
    except UNREADABLE as error:
        raise BadTrace(f"{path}: line {number} is no record: {summarize_error(error)}") from error
    return record


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers. Raises BadTrace."""
    number = 0
    try:
        with open_trace(path, "r") as file:
            while line := file.readline(LINE_LIMIT):
                number += 1
                if not line.endswith("\n") and len(line) >= LINE_LIMIT:
                    raise BadTrace(f"{path}: line {number} is longer than a line may be")
                if not line.endswith("\n"):
                    raise LineCutShort(f"{path}: line {number} was cut short")
                yield number, line
    except OSError as error:
        where = f" after line {number}" if number else ""
        missing = "there is no such file"
        reason = missing if isinstance(error, FileNotFoundError) else f"cannot be read{where}: {error.strerror}"
        raise BadTrace(f"{path}: {reason}") from error
    except (UnicodeDecodeError, zstandard.ZstdError) as error:
        raise BadTrace(f"{path}: unreadable after line {number}: {summarize_error(error)}") from error


def summarize_error(error: BaseException) -> str:
    """Return the type and reason of an error in one line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {str(error)[:400]}".split())[:200]

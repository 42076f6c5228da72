"""Reads logs: finds the format of each file by its content."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zstandard
from attrs import define, field

from adapters import bounded_json, demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens
from engine.core.trace import LINE_LIMIT, open_trace
from engine.settings.output.progress import count_progress
from engine.settings.user_error import UserError
from engine.tools.simulation.logs import claude_code, text_log
from engine.tools.simulation.logs.logged_requests import MOST_TOKENS, BadLog, Session
from engine.tools.simulation.recorded_trace import merge_traces, read_recorded
from engine.tools.simulation.simulated_costs import MeasuredCosts
from states.settings import Settings

# The most characters of a file that is one JSON object.
MOST_OBJECT = 128 << 20
# The most lists and objects in it: two for each request.
MOST_PARTS = 1 << 20
# Characters that are tokenized together. Tokenizing takes some two hundred bytes for each of them.
PIECE = 1 << 15
PIECES = 8  # pieces that are tokenized at once
ACCEPTED = (
    "accepted: a trace of `rekindle serve --trace`, JSON Lines with timestamp, input, output and session_id, "
    "or a JSON object with requests and hash_ids; each may be compressed (.zst)"
)


@define
class Logs:
    """The content of all files. settings: those of the first recorded trace. texts: how texts were tokenized, if any
    were.
    """

    sessions: list[Session] = field(factory=list[Session])
    settings: Settings | None = None
    measured: MeasuredCosts = field(factory=MeasuredCosts)
    formats: dict[str, str] = field(factory=dict[str, str])  # file name -> format
    texts: str = ""


@define
class LogReader:
    """Reads files. model: the folder of the checkpoint whose tokenizer is used; None: the demo's."""

    model: Path | None = None
    shared_head: bool = False
    logs: Logs = field(factory=Logs)
    _tokenizer: Tokenizer | None = None
    _numbers: list[int] = field(factory=list[int])  # the tokens; all texts share one object for each number
    _measured: list[MeasuredCosts] = field(factory=list[MeasuredCosts])

    def read(self, path: Path) -> None:
        """Read a file. Raises UserError with one line, or OSError."""
        try:
            self._read(path)
        except BadLog as error:
            raise UserError(str(error)) from error
        except (UnicodeDecodeError, zstandard.ZstdError) as error:
            raise UserError(f"{path}: unreadable: {str(error)[:120]}; {ACCEPTED}") from error

    def finish(self) -> Logs:
        self.logs.measured = merge_traces(self._measured)
        return self.logs

    def _read(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            raise BadLog(f"{path}: no regular file; {ACCEPTED}")
        with open_trace(path, "r") as file:
            first = file.readline(LINE_LIMIT)
        found = parse_json_line(first)
        if isinstance(found, dict) and "trace" in found:
            self._read_trace(path)
        elif isinstance(found, dict) and ("input" in found or "timestamp" in found):
            self.logs.formats[path.name] = "text"
            self.logs.sessions += text_log.parse_sessions(str(path), number_lines(path), self._encode)
        else:
            self._add_session(path, found)

    def _read_trace(self, path: Path) -> None:
        recorded = read_recorded(path)
        self.logs.formats[path.name] = "recorded"
        self.logs.sessions.append(recorded.session)
        self.logs.settings = self.logs.settings or recorded.settings
        self._measured.append(recorded.measured)

    def _add_session(self, path: Path, found: Any) -> None:
        if not isinstance(found, dict):
            with open_trace(path, "r") as file:
                text = file.read(MOST_OBJECT + 1)
            if len(text) > MOST_OBJECT:
                raise BadLog(f"{path}: more than {MOST_OBJECT} characters; {ACCEPTED}")
            try:
                found = bounded_json.loads(text, MOST_PARTS)
            except json.JSONDecodeError as error:
                raise BadLog(f"{path}: line {error.lineno}: no JSON ({error.msg}); {ACCEPTED}") from error
            except (ValueError, RecursionError) as error:
                raise BadLog(f"{path}: no JSON ({str(error)[:80]}); {ACCEPTED}") from error
        if not isinstance(found, dict) or "requests" not in found:
            raise BadLog(f"{path}: line 1: unknown format; {ACCEPTED}")
        self.logs.formats[path.name] = "claude-code"
        self.logs.sessions.append(claude_code.parse_session(str(path), found, shared_head=self.shared_head))

    def _encode(self, texts: Sequence[str]) -> list[tuple[Tokens, Sequence[int]]]:
        if self._tokenizer is None:
            folder = self.model or demo.FOLDER
            try:
                self._tokenizer = Tokenizer.load(folder)
            except CheckpointError as error:
                raise UserError(f"--model {folder}: {error}") from error
            self.logs.texts = "the demo's tokenizer" if self.model is None else f"the tokenizer of {folder.name}"
            self._numbers = list(range(self._tokenizer.size))
        return list(map(self._encode_pieces, texts))

    def _encode_pieces(self, text: str) -> tuple[Tokens, Sequence[int]]:
        """Tokenize a text in pieces from its beginning, so that texts with a common beginning have common tokens."""
        assert self._tokenizer is not None
        tokens = list[int]()
        begins = array("I")
        pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        for first in range(0, len(pieces), PIECES):
            encodings = self._tokenizer.full.encode_batch(pieces[first : first + PIECES], add_special_tokens=False)
            for number, encoding in enumerate(encodings, first):
                tokens += map(self._numbers.__getitem__, encoding.ids)
                begins.extend(number * PIECE + begin for begin, _ in encoding.offsets)
            if len(tokens) > MOST_TOKENS:
                raise BadLog(f"a text has more than {MOST_TOKENS} tokens")
        return tuple(tokens), begins


def parse_json_line(line: str) -> Any:
    """Return the JSON of a line, or None if it is none."""
    try:
        return bounded_json.loads(line, MOST_PARTS)
    except (ValueError, RecursionError):
        return None


def number_lines(path: Path) -> Iterator[tuple[int, str]]:
    with open_trace(path, "r") as file:
        number = 0
        while line := file.readline(LINE_LIMIT):
            number += 1
            if len(line) >= LINE_LIMIT:
                raise BadLog(f"{path}: line {number}: longer than {LINE_LIMIT} characters; {text_log.ACCEPTED}")
            yield number, line


def read_logs(paths: Sequence[Path], model: Path | None = None, *, shared_head: bool = False) -> Logs:
    """Read log files. Raises UserError or OSError."""
    reader = LogReader(model, shared_head)
    with count_progress("read logs", len(paths)) as step:
        for path in paths:
            reader.read(path)
            step()
    return reader.finish()

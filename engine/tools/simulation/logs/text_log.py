"""Reads logs with text: JSON Lines with `timestamp` (microseconds), `input`, `output` and `session_id`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from attrs import frozen

from adapters import bounded_json
from effects.ids import Tokens
from engine.tools.simulation.logs import logged_requests
from engine.tools.simulation.logs.logged_requests import (
    MOST_REQUESTS,
    Agent,
    BadLog,
    Request,
    Session,
    find_message_starts,
    list_earlier_ends,
    shorten_value,
)

# Takes texts, and returns for each text its tokens and the character at which each token begins.
Encode: TypeAlias = Callable[[Sequence[str]], list[tuple[Tokens, Sequence[int]]]]

MOST_TEXT = 16 << 20  # characters of one prompt
MOST_TEXTS = 512 << 20  # characters of a file
MOST_PARTS = 1 << 14  # lists and objects in one line
ROLE = "(?:system|developer|user|human|assistant|tool|function|model)"
OPENING = re.compile(  # of a message, as chat templates and plain transcripts write it
    rf"<\|im_start\|>{ROLE}\n|<\|start_header_id\|>{ROLE}<\|end_header_id\|>\n\n|<start_of_turn>{ROLE}\n"
    rf"|<\|(?:start\|>)?{ROLE}(?:\|>|<\|message\|>)|\[INST\]|^#{{1,4}} ?{ROLE}:?\n|^{ROLE}: ?",
    re.IGNORECASE | re.MULTILINE,
)
ACCEPTED = 'accepted: {"timestamp": microseconds, "input": text, "output": text, "session_id": text}'


@frozen(eq=False)
class LogLine:
    at_ns: int
    text: str
    answer: str


def parse_sessions(name: str, lines: Iterable[tuple[int, str]], encode: Encode) -> list[Session]:
    """Return the sessions of a file. lines: with their numbers. Raises BadLog."""
    sessions: dict[str, list[LogLine]] = {}
    count = 0
    size = 0
    for number, text in lines:
        if not text.strip():
            continue
        count += 1
        if count > MOST_REQUESTS:
            raise BadLog(f"{name}: line {number}: more than {MOST_REQUESTS} requests")
        session, line = parse_line(f"{name}: line {number}", text)
        size += len(line.text) + len(line.answer)
        if size > MOST_TEXTS:
            raise BadLog(f"{name}: line {number}: more than {MOST_TEXTS} characters of text in all")
        sessions.setdefault(session, []).append(line)
    return [
        Session(session, (build_agent(sorted(lines, key=lambda line: line.at_ns), encode),), absolute=True)
        for session, lines in sessions.items()
    ]


def parse_line(where: str, text: str) -> tuple[str, LogLine]:
    try:
        raw = bounded_json.loads(text, MOST_PARTS)
    except (ValueError, RecursionError) as error:
        raise BadLog(f"{where}: no JSON ({str(error)[:80]}); {ACCEPTED}") from error
    if not isinstance(raw, dict):
        raise BadLog(f"{where}: no JSON object; {ACCEPTED}")
    at = raw.get("timestamp")
    prompt = raw.get("input")
    answer = raw.get("output", "")
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e18:
        raise BadLog(f'{where}: "timestamp" is {shorten_value(at)}; {ACCEPTED}')
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise BadLog(f'{where}: "input" or "output" is no text; {ACCEPTED}')
    if not prompt or max(len(prompt), len(answer)) > MOST_TEXT:
        raise BadLog(f'{where}: "input" is empty, or a text has more than {MOST_TEXT} characters; {ACCEPTED}')
    for logged_text in (prompt, answer):
        logged_requests.read_text(logged_text, where)
    session: Mapping[str, Any] = raw
    name = str(session.get("session_id", where.rpartition(":")[0]))[:200]
    return logged_requests.read_text(name, where), LogLine(round(at * 1000), prompt, answer)


def build_agent(lines: Sequence[LogLine], encode: Encode) -> Agent:
    """Return an agent with a session's requests.

    lines: in any order. encode: called once for prompts and once for answers.
    """
    prompts = encode([line.text for line in lines])
    answers = encode([line.answer for line in lines])
    found = list[Request]()
    before = list[tuple[int, Tokens, Sequence[int]]]()
    for number, (line, (tokens, begins)) in enumerate(zip(lines, prompts, strict=True)):
        earlier = list_earlier_ends(before, lambda end, other, tokens=tokens: tokens[:end] == other)  # type: ignore[misc]
        before.append((len(tokens), tokens, earlier))
        marks = find_markers(line.text, begins)
        answer = answers[number][0] or tokens[-1:]
        found.append(Request(line.at_ns, (tokens,), answer, find_message_starts(len(tokens), marks, earlier)))
    return Agent(tuple(found))


def find_markers(text: str, begins: Sequence[int]) -> list[int]:
    """Return the token at the end of each opening marker, or the first one after it."""
    positions = list[int]()
    token = 0
    for opening in OPENING.finditer(text):
        while token < len(begins) and begins[token] < opening.end():
            token += 1
        positions.append(token)
    return positions

"""Reads logs of coding agents with token counts: one JSON object a session, one hash id for each block of a prompt.

There is no text. Each (session, hash id) stands for its own block of tokens, always the same one. The tokens that no
hash covers, which are the rest of the last block and the answer, occur nowhere else. If the ids say `hash_id_scope:
global`, equal ids are equal blocks in all sessions. https://github.com/callanjfox/kv-cache-tester describes the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from attrs import define, field

from effects.ids import Tokens
from engine.tools.simulation.logs.logged_requests import (
    MOST_REQUESTS,
    MOST_TOKENS,
    Agent,
    BadLog,
    Request,
    Session,
    find_message_starts,
    list_earlier_ends,
    make_tokens,
    read_text,
    shorten_value,
)

MOST_BLOCK = 1 << 12
Earlier: TypeAlias = tuple[int, list[int], Sequence[int]]  # length, whole blocks, where earlier prompts end in it
MOST_DEPTH = 8  # subagents of subagents
# The most tokens that are made up for a file, each block counted once.
MOST_MADE_UP = 1 << 26


def parse_session(name: str, raw: Mapping[str, Any], *, shared_head: bool = False) -> Session:
    """Return the session of the file `name`. Raises BadLog.

    shared_head: sessions with equally many tool tokens begin with the same tools. They share the system prompt too, if
    it has equally many tokens.
    """
    return ClaudeCodeReader(name, raw, shared_head).read_session()


def read_integer(
    raw: Mapping[str, Any], key: str, where: str, *, least: int = 0, most: int = MOST_TOKENS, default: int | None = None
) -> int:
    value = raw.get(key, default)
    if type(value) is not int or not least <= value <= most:
        raise BadLog(f'{where}: "{key}" is {shorten_value(value)}; accepted: an integer from {least} to {most}')
    return value


def read_seconds(raw: Mapping[str, Any], key: str, where: str, default: float | None = None) -> int:
    """Read seconds and return nanoseconds."""
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise BadLog(f'{where}: "{key}" is {shorten_value(value)}; accepted: seconds, as a number from 0')
    return round(value * 1e9)


@define
class ClaudeCodeReader:
    name: str
    raw: Mapping[str, Any]
    shared_head: bool
    _key: str = ""  # the beginning of the names from which tokens are made
    _block: int = 0
    _scope: str = ""
    _head: tuple[int, int] = (0, 0)  # tool tokens, and tool tokens with the system prompt
    _blocks: dict[int, Tokens] = field(factory=dict[int, Tokens])
    _agents: list[Agent] = field(factory=list[Agent])
    _first: Sequence[int] = ()  # hash ids of the session's first request
    _read: int = 0
    _made_up: int = 0

    def read_session(self) -> Session:
        raw = self.raw
        name = self.name
        self._block = read_integer(raw, "block_size", name, least=1, most=MOST_BLOCK, default=64)
        scope = raw.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise BadLog(f'{name}: "hash_id_scope" is {shorten_value(scope)}; accepted: local, global')
        self._key = read_text(str(raw.get("id", Path(name).name.partition(".")[0]))[:200], f'{name}: "id"')
        self._scope = self._key if scope == "local" else "global"
        tools = read_integer(raw, "tool_tokens", name, default=0)
        self._head = (tools, tools + read_integer(raw, "system_tokens", name, default=0))
        self._read_agent(raw.get("requests"), 0, name, 0)
        if not self._agents:
            raise BadLog(f"{name}: no requests in it")
        return Session(self._key, tuple(self._agents))

    def _read_agent(self, listed: Any, start_ns: int, where: str, depth: int) -> None:
        """Read one agent's requests in order of time, and its subagents. A subagent begins when its entry does."""
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise BadLog(f'{where}: "requests" is no list of objects')
        if depth > MOST_DEPTH or self._read + len(listed) > MOST_REQUESTS:
            raise BadLog(f"{where}: more than {MOST_REQUESTS} requests, or subagents {MOST_DEPTH} deep")
        self._read += len(listed)
        timed = []
        for number, raw in enumerate(listed):
            path = f"{where}: request {number}"
            at_ns = read_seconds(raw, "t", path)
            # The time counts from the subagent's own start.
            if at_ns < start_ns:
                at_ns += start_ns
            if "requests" in raw:
                self._read_agent(raw["requests"], at_ns, path, depth + 1)
            if "hash_ids" in raw or "requests" not in raw:
                timed.append((at_ns, number, raw, path))
        found = list[Request]()
        before = list[Earlier]()
        for at_ns, _, raw, path in sorted(timed, key=lambda entry: entry[:2]):
            found.append(self._read_request(at_ns, raw, path, before))
        if found:
            self._agents.append(Agent(tuple(found)))

    def _read_request(self, at_ns: int, raw: Mapping[str, Any], where: str, before: list[Earlier]) -> Request:
        length = read_integer(raw, "in", where, least=1)
        ids = raw.get("hash_ids", [])
        if not isinstance(ids, list) or not all(type(hash_id) is int for hash_id in ids):
            raise BadLog(f'{where}: "hash_ids" is no list of integers')
        ids = ids[: -(-length // self._block)]
        self._first = self._first or ids
        head = self._count_shared_tokens(ids, length)
        pieces = [*self._head_pieces(head), *self._list_body(ids, head, length)]
        rest = length - sum(map(len, pieces))
        own = self._key + where.removeprefix(self.name)
        if rest > 0:
            pieces.append(self._make_tokens(f"{own}: rest", rest))
        out = read_integer(raw, "out", where, default=0)
        ends = list_earlier_ends(before, lambda end, blocks: end <= length and blocks == ids[: len(blocks)])
        before.append((length, ids[: length // self._block], ends))
        return Request(
            at_ns,
            tuple(pieces),
            self._make_tokens(f"{own}: answer", max(1, out)),
            find_message_starts(length, self._head, ends),
            read_seconds(raw, "think_time", where, 0),
        )

    def _count_shared_tokens(self, ids: Sequence[int], length: int) -> int:
        """Return how many leading tokens are the client's own: the session's first request begins with them too."""
        if not self.shared_head:
            return 0
        same = next(
            (at for at, (own_id, other) in enumerate(zip(ids, self._first, strict=False)) if own_id != other), len(ids)
        )
        return min(self._head[1], same * self._block, length)

    def _head_pieces(self, length: int) -> list[Tokens]:
        tools, both = self._head
        parts = (self._make_tokens(f"tools {tools}", tools), self._make_tokens(f"system {tools} {both}", both - tools))
        return [part for part in (parts[0][:length], parts[1][: max(0, length - tools)]) if part]

    def _list_body(self, ids: Sequence[int], start: int, length: int) -> list[Tokens]:
        """Return the tokens that the hash ids cover, from token `start` on."""
        first, into = divmod(start, self._block)
        pieces = [self._make_block(hash_id) for hash_id in ids[first:]]
        if pieces and into:
            pieces[0] = pieces[0][into:]
        over = len(ids) * self._block - length
        if pieces and over > 0:
            pieces[-1] = pieces[-1][: len(pieces[-1]) - over]
        return pieces

    def _make_block(self, block: int) -> Tokens:
        if block not in self._blocks:
            self._blocks[block] = self._make_tokens(f"{self._scope} {block}", self._block)
        return self._blocks[block]

    def _make_tokens(self, name: str, length: int) -> Tokens:
        self._made_up += length
        if self._made_up > MOST_MADE_UP:
            raise BadLog(f"{self.name}: stands for more than {MOST_MADE_UP} different tokens")
        return make_tokens(name, length)

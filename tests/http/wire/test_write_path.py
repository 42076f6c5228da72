"""Pieces of a streamed answer that are written at once, and when they are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import h11
import pytest

from adapters.http.wire.write_path import write_now

REQUEST = h11.Request(method="POST", target="/", headers=[("host", "here")])
WRITTEN = list[bytes]


def make_cycle(written: WRITTEN, *, begins: bool = True) -> Any:
    """Return a cycle as uvicorn has it. begins: its answer has begun."""
    conn = h11.Connection(h11.SERVER)
    conn.receive_data(h11.Connection(h11.CLIENT).send(REQUEST) or b"")
    conn.next_event()
    if begins:
        conn.send(h11.Response(status_code=200, headers=[]))
    return SimpleNamespace(
        disconnected=False,
        flow=SimpleNamespace(write_paused=False),
        scope={"method": "POST", "http_version": "1.1"},
        conn=conn,
        transport=SimpleNamespace(write=written.append),
    )


def test_a_piece_is_written_as_h11_would_write_it() -> None:
    written = WRITTEN()
    cycle = make_cycle(written)
    for body in (b"data: 1", b"x" * 300):
        assert write_now(cycle, body)
        assert written.pop() == cycle.conn.send(h11.Data(data=body))
    assert cycle.conn.send(h11.EndOfMessage()) == b"0\r\n\r\n"
    assert not write_now(cycle, b"data: 2"), "the answer has ended"


def test_nothing_is_written_before_an_answer_has_begun() -> None:
    written = WRITTEN()
    assert not write_now(make_cycle(written, begins=False), b"data: 1")
    assert not written


@pytest.mark.parametrize("why", ["paused", "disconnected", "HEAD", "1.0"])
def test_nothing_is_written_where_the_server_would_wait_or_the_answer_has_no_chunks(why: str) -> None:
    written = WRITTEN()
    cycle = make_cycle(written)
    cycle.flow.write_paused = why == "paused"
    cycle.disconnected = why == "disconnected"
    cycle.scope = {"method": "HEAD" if why == "HEAD" else "POST", "http_version": "1.0" if why == "1.0" else "1.1"}
    assert not write_now(cycle, b"data: 1")
    assert not written

"""Pieces of a streamed answer that are written at once, and when they are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import h11
import pytest

from adapters.http.wire.write_path import write_now

REQUEST = h11.Request(method="POST", target="/", headers=[("host", "here")])
WRITTEN = list[bytes]


def make_cycle(written: WRITTEN, **changed: Any) -> Any:
    """Return a cycle whose answer has begun, as uvicorn has it."""
    conn = h11.Connection(h11.SERVER)
    conn.receive_data(h11.Connection(h11.CLIENT).send(REQUEST) or b"")
    conn.next_event()
    conn.send(h11.Response(status_code=200, headers=[]))
    fields = {"response_started": True, "response_complete": False, "disconnected": False}
    return SimpleNamespace(
        **(fields | changed),
        flow=SimpleNamespace(write_paused=False),
        scope={"method": "POST"},
        conn=conn,
        transport=SimpleNamespace(write=written.append),
    )


def test_a_piece_is_written_as_a_chunk() -> None:
    written = WRITTEN()
    cycle = make_cycle(written)
    assert write_now(cycle, b"data: 1")
    assert b"".join(written) == b"7\r\ndata: 1\r\n"


@pytest.mark.parametrize(
    "changed", [{"response_started": False}, {"response_complete": True}, {"disconnected": True}, {"paused": True}]
)
def test_nothing_is_written_where_the_server_would_wait_or_refuse(changed: dict[str, bool]) -> None:
    written = WRITTEN()
    cycle = make_cycle(written, **changed)
    cycle.flow.write_paused = "paused" in changed
    assert not write_now(cycle, b"data: 1")
    assert not written


def test_an_answer_to_head_has_no_body() -> None:
    written = WRITTEN()
    cycle = make_cycle(written)
    cycle.scope = {"method": "HEAD"}
    assert not write_now(cycle, b"data: 1")
    assert not written

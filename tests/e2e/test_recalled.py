"""A server is ready before it has read what was said before; who may mean that waits for it."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import pytest

from adapters.http.history.answer_tokens import TurnMemory
from engine.settings.options import build_options
from tests.e2e.test_leaks import TALK, served


@pytest.mark.timeout(120)
async def test_a_chat_waits_for_what_was_said_before_and_text_alone_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, held, order = TurnMemory.load, threading.Event(), list[str]()

    def slow(self: TurnMemory, *how: object) -> None:
        assert held.wait(60)
        load(self)
        order.append("read")

    monkeypatch.setattr(TurnMemory, "load", slow)
    async with served(build_options(port=0, kv_cache_dir=tmp_path / "kv")) as client:

        async def chat() -> None:
            body = {"messages": TALK, "max_tokens": 2, "temperature": 0}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            order.append("chat")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(chat)
            body = {"prompt": "def add(a, b):\n", "max_tokens": 2, "temperature": 0}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            order.append("text")
            held.set()
    assert order == ["text", "read", "chat"]

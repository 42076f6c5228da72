"""Tests of the queue of runs that are written to a shared store: what it counts while uploads come and go."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from adapters.store.shared import publisher
from adapters.store.shared.publish_policy import SharedLimits
from adapters.store.shared.publisher import Publisher


class StuckClient:
    """A store that takes an object and never answers."""

    folder = None

    async def write_object(self, name: str, parts: list[bytes], *, replace: bool) -> None:
        await asyncio.Event().wait()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("at_once", [1, 2], ids=["one waits for its turn", "both are being written"])
def test_files_of_cancelled_uploads_are_not_counted_any_more(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    catalogue = SimpleNamespace(
        lock=threading.RLock(),
        root=b"",
        count_held_bytes=lambda: 0,
        is_known=lambda _run: False,
        may_be_replaced=lambda _name: False,
    )
    made = Publisher(
        cast(Any, StuckClient()), cast(Any, None), cast(Any, catalogue), cast(Any, None), SharedLimits(1 << 30, 0, 1e9),
        print, lambda: 0.0, Counter(),
    )  # fmt: skip
    monkeypatch.setattr(Publisher, "_make_file", lambda _self, _run, _held: [b"x" * 100])
    monkeypatch.setattr(publisher, "name_run", lambda _root, run: run)
    released = list[str]()

    async def run() -> None:
        uploads = asyncio.Semaphore(at_once)
        tasks = [asyncio.create_task(made.empty_queue(uploads)) for _ in range(2)]
        while made.uploading_bytes < 200:  # noqa: ASYNC110 - no event marks it
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    for name in ("first", "second"):
        job = SimpleNamespace(run=name, rows=None, size=10, finish=lambda name=name: released.append(name))
        assert made.submit(cast(Any, job), usable=True)
    asyncio.run(run())
    assert sorted(released) == ["first", "second"]
    assert made.is_idle

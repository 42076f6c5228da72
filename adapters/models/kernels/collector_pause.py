"""A pause of Python's garbage collector while CUDA graphs are recorded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_paused: ContextVar[bool] = ContextVar("is_paused", default=False)


@contextmanager
def pause_collector() -> Iterator[None]:
    """Keep the collector from running, after one run at the beginning.

    An event or a graph that is freed meanwhile, on whatever thread, would spoil the recording. A pause inside another
    pause of the same context changes nothing and collects nothing first.
    """
    if _is_paused.get():
        yield
        return
    was_enabled = gc.isenabled()
    outer = _is_paused.set(True)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        _is_paused.reset(outer)
        if was_enabled:
            gc.enable()

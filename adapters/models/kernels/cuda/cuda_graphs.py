"""CUDA graphs: a fixed sequence of kernel launches, recorded once for each key and replayed with one call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from attrs import define, field

from adapters.models.kernels.layer_kinds import leaves_out

T = TypeVar("T")
_not_collecting: ContextVar[bool] = ContextVar("not_collecting", default=False)


@define(eq=False)
class GraphCache:
    """Runs bodies eagerly the first time (which compiles their kernels), records them the second, then replays. Where
    bodies leave something out (`kinds.one_of_each`) they are run, however often.

    A body must launch the same kernels over the same buffers each time and never wait for the device. What it
    returned when it was recorded is the graph's own and is filled again by each replay. On a device without graphs
    bodies just run.
    """

    device: torch.device
    enabled: bool = True
    _seen: set[Hashable] = field(init=False, factory=set)
    _graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = field(init=False, factory=dict)
    _recorder: torch.cuda.Stream | None = field(init=False, default=None)

    def run(self, key: Hashable, body: Callable[[], T]) -> T:
        if self.device.type != "cuda" or not self.enabled:
            return body()
        if key not in self._seen or leaves_out():
            self._seen.add(key)
            return body()
        if key not in self._graphs:
            self._graphs[key] = self._record(body)
        graph, result = self._graphs[key]
        graph.replay()
        return result

    def _record(self, body: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Unlike `torch.cuda.graph` it waits for the device only to give memory back, and lets pinned memory be."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # a graph has memory of its own: what the allocator keeps for others is none of it
        with no_collection(), torch.cuda.stream(self._stream()):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = body()
            finally:
                graph.capture_end()
        return graph, result

    def _stream(self) -> torch.cuda.Stream:
        if self._recorder is None:
            self._recorder = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._recorder


@contextmanager
def no_collection() -> Iterator[None]:
    """Freeing an event or a graph meanwhile, on whatever thread, would spoil the recording. Inside another one of
    these, nothing has to be collected first.
    """
    if _not_collecting.get():
        yield
        return
    collecting, outer = gc.isenabled(), _not_collecting.set(True)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        _not_collecting.reset(outer)
        if collecting:
            gc.enable()

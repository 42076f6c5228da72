"""CUDA graphs: a fixed sequence of kernel launches, recorded once for each key and replayed with one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from attrs import define, field

from adapters.models.kernels.collector_pause import pause_collector
from adapters.models.kernels.layer_kinds import is_leaving_out

T = TypeVar("T")


@define(eq=False)
class GraphCache:
    """Runs a body eagerly the first time (which compiles its kernels), records it the second time, and replays it
    afterwards.

    A body must launch the same kernels over the same buffers each time and never wait for the device. What it
    returned when it was recorded belongs to the graph and is filled again by each replay. Inside
    `layer_kinds.run_one_of_each`, and on a device without graphs, bodies just run.
    """

    device: torch.device
    enabled: bool = True
    _seen: set[Hashable] = field(init=False, factory=set)
    _graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = field(init=False, factory=dict)
    _pool: Any = field(init=False, default=None)
    _recorder: torch.cuda.Stream | None = field(init=False, default=None)

    def run(self, key: Hashable, body: Callable[[], T], *, shares_memory: bool = False) -> T:
        """Run a body, or its graph. shares_memory: with other such bodies, of which no two ever run at the same time.

        A graph of its own memory takes megabytes. Only what a body returns is kept from one to the next.
        """
        if self.device.type != "cuda" or not self.enabled:
            return body()
        if key not in self._seen or is_leaving_out():
            self._seen.add(key)
            return body()
        if key not in self._graphs:
            self._graphs[key] = self._record(body, self._find_pool() if shares_memory else None)
        graph, result = self._graphs[key]
        graph.replay()
        return result

    def _find_pool(self) -> Any:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _record(self, body: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
        """Record a body. Unlike `torch.cuda.graph` this waits for the device only to give memory back, and leaves
        pinned memory alone.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # a graph cannot use memory that the allocator caches
        with pause_collector(), torch.cuda.stream(self._stream()):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                result = body()
            finally:
                graph.capture_end()
        return graph, result

    def _stream(self) -> torch.cuda.Stream:
        if self._recorder is None:
            self._recorder = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._recorder

"""Triton's kernels compiled by worker processes before their first launch.

Compiling one takes half a second, and Python's own part of it keeps the interpreter from every other thread. A caller
that launches kernels one after the other would wait for each. So launches are withheld first, which collects all
kernels that are missing, then processes compile them, and the real launches find them in Triton's cache.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from attrs import define, field
from triton import knobs
from triton.runtime import cache, driver

import adapters.models.kernels.cuda.compilation.compile  # noqa: F401 - the same digests as with who compiles
from adapters.models.kernels.cuda.compilation.compile_worker import KernelRequest
from adapters.models.kernels.cuda.compilation.worker_pool import run_lines
from adapters.models.kernels.triton_launch import withhold_launches

log = logging.getLogger("rekindle")

WORKER = "adapters.models.kernels.cuda.compilation.compile_worker"


def _triton_key() -> str:
    key = getattr(cache, "triton_key", None)
    return "" if key is None else str(key())


@define(eq=False)
class RequestedKernels:
    """Implements `CompileRequests`. lines: each kernel as a line of JSON for `compile_worker`, with the length of its
    source.
    """

    lines: dict[str, int] = field(init=False, factory=dict[str, int])
    key: str = field(factory=_triton_key)

    def request(self, *, fn: Any, compile: Mapping[str, str], **_: object) -> bool:  # noqa: A002 - Triton's name for it
        """Record a kernel that Triton is about to compile, and return True to keep it from compiling
        (`jit_cache_hook`).
        """
        target = driver.active.get_current_target()
        wanted: KernelRequest = {
            "module": fn.module,
            "name": fn.name,
            "triton": self.key,
            "target": (target.backend, target.arch, target.warp_size),
            "data": compile["specialization_data"],
        }
        self.lines[json.dumps(wanted)] = len(fn.jit_function.src)
        return True

    def compile_in_processes(self) -> None:
        """Compile all of them, the longest first. What is not compiled in the end will be where it is launched."""
        for why in run_lines(sorted(self.lines, key=lambda line: -self.lines[line]), WORKER):
            log.debug("a kernel will be compiled when it is first used: %s", why)


_asked: ContextVar[RequestedKernels | None] = ContextVar("asked", default=None)


class RequestHook:
    """Triton's `jit_cache_hook`, called for every kernel that the process does not have. It is false outside
    `collect_requests`: Triton would write a kernel's constants down for the hook, and not all constants can be
    written.
    """

    def __bool__(self) -> bool:
        return _asked.get() is not None

    def __call__(self, **about: Any) -> bool:
        asked = _asked.get()
        return asked is not None and asked.request(**about)


@contextmanager
def collect_requests() -> Iterator[RequestedKernels]:
    """Withhold the launches of this context and collect the kernels that are missing.

    The process must not have launched such kernels before. Where another hook is installed, kernels are compiled at
    once.
    """
    asked = RequestedKernels()
    if knobs.runtime.jit_cache_hook is None:
        knobs.runtime.jit_cache_hook = RequestHook()
    outer = _asked.set(asked)
    try:
        with withhold_launches():
            yield asked
    finally:
        _asked.reset(outer)

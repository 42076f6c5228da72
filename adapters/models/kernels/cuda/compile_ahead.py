"""Triton's kernels compiled by processes: found out without a launch, and found in Triton's cache by whoever launches.

To compile one takes half a second, of which Python's own part keeps the interpreter from every other thread; and who
launches one after the other would wait for each. So all of them are asked for first, by launches that are withheld.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from attrs import define, field
from triton import knobs
from triton.runtime import cache, driver

import adapters.models.kernels.cuda.compile  # noqa: F401 - the same digests as with who compiles
from adapters.models.kernels.cuda.worker_pool import all_done
from adapters.models.kernels.triton.launch import withholding

log = logging.getLogger("rekindle")

WORKER = "adapters.models.kernels.cuda.compile_worker"


def _triton_key() -> str:
    key = getattr(cache, "triton_key", None)
    return "" if key is None else str(key())


@define(eq=False)
class KernelsAsked:
    """Kernels that withheld launches ask for: each a line of JSON, as `triton_worker` reads them, by how long its
    source is.
    """

    lines: dict[str, int] = field(init=False, factory=dict[str, int])
    key: str = field(factory=_triton_key)

    def hear(self, *, fn: Any, compile: dict[str, Any], **_: object) -> bool:  # noqa: A002 - Triton's name for it
        """As Triton calls a `jit_cache_hook`; True keeps it from compiling."""
        target = driver.active.get_current_target()
        kind = {"module": fn.module, "name": fn.name, "triton": self.key}
        on = [target.backend, target.arch, target.warp_size]
        line = json.dumps({**kind, "target": on, "data": compile["specialization_data"]})
        self.lines[line] = len(fn.jit_function.src)
        return True


_asked: ContextVar[KernelsAsked | None] = ContextVar("asked", default=None)


class AskersHook:
    """Triton's `jit_cache_hook`, of every kernel that the process does not know, whoever launches it. There is none but
    for who asks: Triton would write a kernel's constants down for it, and not all can be.
    """

    def __bool__(self) -> bool:
        return _asked.get() is not None

    def __call__(self, **about: Any) -> bool:
        asked = _asked.get()
        return asked is not None and asked.hear(**about)


@contextmanager
def asking() -> Iterator[KernelsAsked]:
    """What this context launches in here is not launched, and what is not compiled is asked for, in a process that has
    launched nothing like it before. Where somebody else listens to Triton, it is compiled at once.
    """
    asked = KernelsAsked()
    if knobs.runtime.jit_cache_hook is None:
        knobs.runtime.jit_cache_hook = AskersHook()
    outer = _asked.set(asked)
    try:
        with withholding():
            yield asked
    finally:
        _asked.reset(outer)


def compile_apart(asked: KernelsAsked) -> None:
    """All of them, the longest first. What is not compiled in the end will be where it is launched."""
    for why in all_done(sorted(asked.lines, key=lambda line: -asked.lines[line]), WORKER):
        log.debug("a kernel is compiled later: %s", why)

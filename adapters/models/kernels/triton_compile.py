"""Triton's kernels compiled by several threads at once, before anybody waits for one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache as once
from threading import Thread

from triton import AsyncCompileMode
from triton.runtime import build, cache

from adapters.models.kernels.launchers import kept_apart

if hasattr(build, "_load_module_from_path"):
    build._load_module_from_path = kept_apart(build._load_module_from_path)  # noqa: SLF001 - nothing else is offered


@once
def key_beside() -> Thread:
    """Every kernel is looked up by a digest of all of Triton, half a second's work, which is taken by a thread from the
    first call on. To be waited for before kernels are launched: each thread that finds it missing would take it once
    more.
    """
    taking = Thread(target=getattr(cache, "triton_key", None), name="triton-key", daemon=True)
    taking.start()
    return taking


@contextmanager
def compiling_aside() -> Iterator[None]:
    """What is launched in here, by any thread that runs in a copy of this context, is compiled by other threads, and
    but once. What cannot be compiled fails where it is launched.
    """
    threads = ThreadPoolExecutor(os.cpu_count() or 1, "compiling")
    with threads, AsyncCompileMode(threads, ignore_errors=True):
        yield

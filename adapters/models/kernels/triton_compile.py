"""Triton's kernels compiled by several threads at once, before anybody waits for one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from triton import AsyncCompileMode


@contextmanager
def compiling_aside() -> Iterator[None]:
    """What is launched in here, by any thread that runs in a copy of this context, is compiled by other threads, and
    but once. What cannot be compiled fails where it is launched.
    """
    threads = ThreadPoolExecutor(os.cpu_count() or 1, "compiling")
    with threads, AsyncCompileMode(threads, ignore_errors=True):
        yield

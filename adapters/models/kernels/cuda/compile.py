"""How Triton's kernels are compiled and found again: alike in each process, and by several threads at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache as once
from functools import partial
from subprocess import SubprocessError
from threading import Thread

from triton import AsyncCompileMode
from triton.runtime import build, cache, jit

from adapters.models.kernels.cuda.digests import known_first
from adapters.models.kernels.cuda.launchers import kept_apart

if hasattr(build, "_load_module_from_path"):
    build._load_module_from_path = kept_apart(build._load_module_from_path)  # noqa: SLF001 - nothing else is offered

if (finder := getattr(jit, "DependenciesFinder", None)) is not None and hasattr(finder, "_update_hash"):
    finder._update_hash = known_first(finder._update_hash)  # noqa: SLF001

# A kernel goes through five forms. The last one, which is launched, is kept with its source: a later start would read
# all that it finds.
os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")


@once
def key_beside() -> Thread:
    """Every kernel is looked up by a digest of all of Triton, half a second's work, which is taken by a thread from the
    first call on. To be waited for before kernels are launched: each thread that finds it missing would take it once
    more.
    """
    return beside(getattr(cache, "triton_key", None), getattr(build, "platform_key", None))


def tools_beside(capability: int) -> Thread:
    """The same of the version of what compiles for GPUs of that compute capability, 90 for 9.0: part of every kernel's
    name, and a program has to be asked.
    """
    asked = list[Callable[[], object]]()
    with suppress(ImportError, AttributeError):
        from triton.backends.nvidia import compiler  # noqa: PLC0415 - there is none in what is built for others

        asked.append(partial(compiler.get_ptxas_version, capability))
    return beside(*asked)


def beside(*asked: Callable[[], object] | None) -> Thread:
    """They are called on a thread of their own, where there are such; their answers are kept by themselves. What goes
    wrong goes wrong again, and is told, where a kernel is looked up.
    """

    def call() -> None:
        for one in filter(None, asked):
            with suppress(OSError, RuntimeError, ValueError, SubprocessError):
                one()

    thread = Thread(target=call, name="triton-key", daemon=True)
    thread.start()
    return thread


@contextmanager
def compiling_aside() -> Iterator[None]:
    """What is launched in here, by any thread that runs in a copy of this context, is compiled by other threads, and
    but once. What cannot be compiled fails where it is launched.
    """
    threads = ThreadPoolExecutor(os.cpu_count() or 1, "compiling")
    with threads, AsyncCompileMode(threads, ignore_errors=True):
        yield

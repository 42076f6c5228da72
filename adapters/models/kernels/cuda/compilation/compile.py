"""Compiling Triton's kernels and finding them again: with the same digests in each process, and by several threads."""

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

from adapters.models.kernels.cuda.compilation.digests import hash_callees_first
from adapters.models.kernels.cuda.compilation.launchers import load_separately
from adapters.processors import count_processors

if hasattr(build, "_load_module_from_path"):
    build._load_module_from_path = load_separately(build._load_module_from_path)  # noqa: SLF001 - nothing else is offered

if (finder := getattr(jit, "DependenciesFinder", None)) is not None and hasattr(finder, "_update_hash"):
    finder._update_hash = hash_callees_first(finder._update_hash)  # noqa: SLF001

# Triton compiles a kernel through five forms. Only the last one, which is launched, is kept with its source, because a
# later start would read all of them.
os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")


@once
def start_key() -> Thread:
    """Return the thread that computes Triton's digest of itself, by which every kernel is looked up.

    It takes half a second and starts with the first call. Join the thread before launching kernels: each launching
    thread that finds the digest missing would compute it once more.
    """
    return call_on_thread(getattr(cache, "triton_key", None), getattr(build, "platform_key", None))


def start_tool_versions(capability: int) -> Thread:
    """Start a thread that asks the assembler for its version, which is part of every kernel's name and takes a
    subprocess.

    capability: the GPU's compute capability, 90 for 9.0.
    """
    asked = list[Callable[[], object]]()
    with suppress(ImportError, AttributeError):
        from triton.backends.nvidia import compiler  # noqa: PLC0415 - there is none in what is built for others

        asked.append(partial(compiler.get_ptxas_version, capability))
    return call_on_thread(*asked)


def call_on_thread(*asked: Callable[[], object] | None) -> Thread:
    """Call functions on a thread of their own, where they exist; they cache their answers themselves. An error shows
    up again where a kernel is looked up.
    """

    def call() -> None:
        for one in filter(None, asked):
            with suppress(OSError, RuntimeError, ValueError, SubprocessError):
                one()

    thread = Thread(target=call, name="triton-key", daemon=True)
    thread.start()
    return thread


@contextmanager
def compile_in_threads() -> Iterator[None]:
    """Compile the launches of this context, and of threads that run in a copy of it, on other threads, each kernel
    once.

    A kernel that cannot be compiled fails where it is launched.
    """
    threads = ThreadPoolExecutor(count_processors(), "compiling")
    with threads, AsyncCompileMode(threads, ignore_errors=True):
        yield

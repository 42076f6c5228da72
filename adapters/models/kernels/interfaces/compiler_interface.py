"""Compiling a GPU's kernels ahead of their first launch, as an interface; `factory.build_compiler` builds it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import Thread
from typing import Protocol


class CompileRequests(Protocol):
    """Kernels that withheld launches asked for and that no cache has."""

    def compile_in_processes(self) -> None:
        """Compile all of them in worker processes. What fails is compiled where it is launched."""
        ...


class KernelCompiler(Protocol):
    """The compiler of one process."""

    def start_key(self) -> Thread:
        """Return the thread that computes the digest under which every kernel is looked up; join it before a launch."""
        ...

    def start_tool_versions(self, capability: int) -> Thread:
        """Start a thread that asks the assembler for its version, a part of every kernel's name.

        capability: the GPU's compute capability, 90 for 9.0.
        """
        ...

    def collect_requests(self) -> AbstractContextManager[CompileRequests]:
        """Return a context in which launches do not run: those that need compiling are collected instead."""
        ...

    def compile_in_threads(self) -> AbstractContextManager[None]:
        """Return a context in which launches are compiled by other threads, each kernel once."""
        ...

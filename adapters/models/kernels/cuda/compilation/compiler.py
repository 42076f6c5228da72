"""Triton's compiler behind the `KernelCompiler` interface."""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import Thread

from attrs import frozen

from adapters.models.kernels.cuda.compilation.compile import compile_in_threads, start_key, start_tool_versions
from adapters.models.kernels.cuda.compilation.compile_ahead import collect_requests
from adapters.models.kernels.interfaces.compiler_interface import CompileRequests


@frozen
class TritonCompiler:
    """Implements `KernelCompiler`."""

    def start_key(self) -> Thread:
        return start_key()

    def start_tool_versions(self, capability: int) -> Thread:
        return start_tool_versions(capability)

    def collect_requests(self) -> AbstractContextManager[CompileRequests]:
        return collect_requests()

    def compile_in_threads(self) -> AbstractContextManager[None]:
        return compile_in_threads()

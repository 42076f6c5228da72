"""The process that compiles kernels for another one. `compile_ahead.py` starts it with `python -m`.

It reads a line of JSON for each kernel: the function's module and name, the target, and the argument of Triton's
`preload`. It leaves the kernel and its launcher in Triton's cache and answers with a line: empty, or the reason why
it failed. It ends when its input is closed. It needs no GPU and never opens one.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from importlib import import_module
from subprocess import SubprocessError
from typing import Any, TypedDict

from attrs import frozen
from triton.backends.compiler import GPUTarget
from triton.runtime import cache, driver

import adapters.models.kernels.cuda.compilation.compile  # noqa: F401 - the same digests as with who asks


@frozen
class NoDriver:
    """The part of Triton's driver that compiling needs."""

    target: GPUTarget

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


class KernelRequest(TypedDict):
    """A kernel that is to be compiled, as a line of JSON.

    module, name: where the function is found. triton: the digest of Triton, which names its cached files; "": to be
    computed. target: backend, architecture and threads of a warp. data: the argument of Triton's `preload`.
    """

    module: str
    name: str
    triton: str
    target: tuple[str, int | str, int]
    data: str


def compile_one(asked: KernelRequest) -> None:
    """Compile a kernel into Triton's cache. Raises what Triton raises."""
    if asked["triton"]:  # a digest of all of Triton, which takes half a second
        cache.triton_key = lambda: asked["triton"]
    driver.set_active(NoDriver(GPUTarget(*asked["target"])))
    function = getattr(import_module(asked["module"]), asked["name"])
    build_launcher(function.preload(asked["data"]), asked["target"][0])


def build_launcher(kernel: Any, backend: str) -> None:
    """Build the C extension that launches a kernel, one for all kernels of a signature, into Triton's cache. On
    failure the launching process builds it.
    """
    if backend == "cuda":
        with suppress(AssertionError, AttributeError, ImportError, OSError, RuntimeError, SubprocessError):
            import_module("triton.backends.nvidia.driver").CudaLauncher(kernel.src, kernel.metadata)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)  # other output must not be taken for an answer
    for line in sys.stdin:
        why = ""
        try:
            compile_one(json.loads(line))
        except Exception as error:  # noqa: BLE001 - the answer says so, and the asking process compiles it
            why = " ".join(f"{type(error).__name__}: {error}".split())
        answers.write(why + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

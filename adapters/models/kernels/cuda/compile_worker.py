"""The process that compiles kernels for another one: `python -m adapters.models.kernels.cuda.compile_worker`.

Reads a line of JSON for each: the function's module and name, the target, and what Triton's `preload` takes. Triton's
cache has the kernel then, and what launches it, and a line is written: empty, or why there is none. It ends when nobody
writes to it any more. It needs no GPU, and never opens one.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from importlib import import_module
from subprocess import SubprocessError
from typing import Any

from attrs import frozen
from triton.backends.compiler import GPUTarget
from triton.runtime import cache, driver

import adapters.models.kernels.cuda.compile  # noqa: F401 - the same digests as with who asks


@frozen
class NoDriver:
    """As much of Triton's driver as compiling takes."""

    target: GPUTarget

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def compile_one(asked: dict[str, Any]) -> None:
    if asked["triton"]:  # a digest of all of Triton, which takes half a second
        cache.triton_key = lambda: asked["triton"]
    driver.set_active(NoDriver(GPUTarget(*asked["target"])))
    function = getattr(import_module(asked["module"]), asked["name"])
    build_launcher(function.preload(asked["data"]), asked["target"][0])


def build_launcher(kernel: Any, backend: str) -> None:
    """A kernel is launched by a module that a C compiler makes, one for all of a signature, and Triton keeps that, too.
    What cannot be made here is made by who launches it.
    """
    if backend == "cuda":
        with suppress(AssertionError, AttributeError, ImportError, OSError, RuntimeError, SubprocessError):
            import_module("triton.backends.nvidia.driver").CudaLauncher(kernel.src, kernel.metadata)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)  # whatever else is printed is no answer
    for line in sys.stdin:
        why = ""
        try:
            compile_one(json.loads(line))
        except Exception as error:  # noqa: BLE001 - whoever asked is told, and compiles it by itself
            why = " ".join(f"{type(error).__name__}: {error}".split())
        answers.write(why + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

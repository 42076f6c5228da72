"""Compiles all modules before the workers of a run start, so that each of them is compiled once.

Without it, every worker compiles all modules of a fresh clone, at the same time as the others. That takes a worker 21 s
of processor time, most of it for rewriting the assertions of tests (Intel Xeon 2.8 GHz). Here each core takes its part
of the modules, and the workers find them compiled.
"""

from __future__ import annotations

import compileall
import importlib.util
import multiprocessing
import os
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("adapters", "benchmarks", "effects", "engine", "states", "tests", "training")


def compile_modules() -> None:
    """Compile every module of this tree that is not compiled yet, on all cores.

    This process must have one thread, since it is forked.
    """
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        pool.map(compile_module, paths, chunksize=8)


def compile_module(path: Path) -> None:
    """Compile one module and keep the result, as its import does.

    Only the loader that imports a module of the tests knows how to rewrite its assertions, and it compiles a module
    only to run it. Without builtins the module fails at its first import, so nothing of it runs.
    """
    inner = path.relative_to(ROOT)
    if inner.parts[0] != "tests":
        compileall.compile_file(path, quiet=1)
        return
    spec = importlib.util.find_spec(".".join(inner.with_suffix("").parts).removesuffix(".__init__"))
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__builtins__"] = {}
    with suppress(ImportError, NameError):
        spec.loader.exec_module(module)

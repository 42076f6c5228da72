"""Triton's launchers: an extension module for each signature of kernels, all with the same module name."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import TypeAlias

Load: TypeAlias = Callable[[str, str], ModuleType | SimpleNamespace]


def load_separately(load: Load) -> Load:
    """Wrap `load(name, path)` of extension modules so that several threads may load them.

    Such a module, loaded before (PEP 489's single-phase initialisation, `m_size` -1), is given as
    `sys.modules[name]`, overwritten with the content of this path's module. So of two threads with a kernel each, one
    may get the other's launcher and launch with another signature than the kernel's. Here each thread gets the
    module's content in an object of its own, and modules that were loaded before are reused.
    """
    alone = Lock()
    known = dict[tuple[str, str], SimpleNamespace]()

    def load_once(name: str, path: str) -> SimpleNamespace:
        with alone:
            if (name, path) not in known:
                known[name, path] = SimpleNamespace(**vars(load(name, path)))
            return known[name, path]

    return load_once

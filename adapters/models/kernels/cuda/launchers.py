"""Triton's launchers: an extension module for each signature, all of one name."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import TypeAlias

Load: TypeAlias = Callable[[str, str], ModuleType | SimpleNamespace]


def kept_apart(load: Load) -> Load:
    """`load(name, path)` of extension modules that several threads may load.

    Such a module, loaded before (PEP 489's single-phase initialisation, `m_size` -1), is given as `sys.modules[name]`,
    overwritten with what this path's module holds. So of two threads with a kernel each, one may get the other's
    launcher, and launch with another signature than the kernel's. Here each gets what it holds, by itself, and what
    has been loaded, for a kernel of the same signature, is there.
    """
    alone, known = Lock(), dict[tuple[str, str], SimpleNamespace]()

    def loaded(name: str, path: str) -> SimpleNamespace:
        with alone:
            if (name, path) not in known:
                known[name, path] = SimpleNamespace(**vars(load(name, path)))
            return known[name, path]

    return loaded

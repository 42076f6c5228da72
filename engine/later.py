"""A module that is executed when something in it is asked for, and not when it is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import Any


class Later(Loader):
    """Its first attribute that is not there brings the rest (PEP 562)."""

    def __init__(self, real: Loader) -> None:
        self._real, self._begun, self._lock = real, False, RLock()

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        inside = vars(module)

        def asked(name: str) -> Any:
            if name.startswith("__"):  # asked for by whoever imports it
                raise AttributeError(name)
            with self._lock:  # another thread that asks meanwhile waits; the module itself may look for what it lacks
                if not self._begun:
                    self._begun = True
                    self._real.exec_module(module)
            if name in inside:
                return inside[name]
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        inside["__getattr__"] = asked


class Finder(MetaPathFinder):
    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Later(spec.loader)
        return spec


def import_later(name: str) -> None:
    """Unless it is there already."""
    sys.meta_path.insert(0, Finder(name))

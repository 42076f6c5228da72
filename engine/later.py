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
        self._real, self._lock = real, RLock()
        self._waiting: ModuleType | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        inside, self._waiting = vars(module), module

        def asked(name: str) -> Any:
            if name.startswith("__"):  # asked for by whoever imports it
                raise AttributeError(name)
            self.execute()
            if name in inside:
                return inside[name]
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        inside["__getattr__"] = asked

    def execute(self) -> None:
        """Once. Another thread that wants it meanwhile waits; the module itself may look for what it lacks."""
        with self._lock:
            module, self._waiting = self._waiting, None
            if module is not None:
                self._real.exec_module(module)


class Finder(MetaPathFinder):
    """users: modules that need it, though they ask for nothing in it. Who imports one of them has it executed first."""

    def __init__(self, name: str, users: Sequence[str] = ()) -> None:
        self._name, self._users = name, users
        self._later: Later | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self._users and self._later is not None:
            self._later.execute()
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            self._later = spec.loader = Later(spec.loader)
        return spec


def import_later(name: str, users: Sequence[str] = ()) -> None:
    """Unless it is there already. users: as `Finder` has them."""
    sys.meta_path.insert(0, Finder(name, users))

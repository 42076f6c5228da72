"""Modules that take seconds to import: only a process that runs their tests does so, not each that collects them."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """Stands for a module, and imports it when one of its members is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, member: str) -> Any:
        if member.startswith("_"):  # what pytest asks of everything that it finds in a module of tests
            raise AttributeError(member)
        return getattr(import_module(self._name), member)

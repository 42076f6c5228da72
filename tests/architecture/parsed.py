"""Modules as syntax trees. Each is read, parsed and walked once for all rules."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parse_module(path: Path) -> ast.Module:
    return ast.parse(read_module(path))


@cache
def walk_module(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of a module, in the order of `ast.walk`."""
    return tuple(ast.walk(parse_module(path)))


@cache
def read_module(path: Path) -> str:
    return path.read_text(encoding="utf-8")

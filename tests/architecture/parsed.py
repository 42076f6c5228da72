"""Modules as syntax trees. Each is parsed once for all rules."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parse_module(path: Path) -> ast.Module:
    return ast.parse(path.read_text())

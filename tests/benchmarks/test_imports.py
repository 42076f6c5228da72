"""The benchmarks import only names that exist. Many of them need a GPU, so no other test imports them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
TREES = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.py")}


def list_names(tree: ast.Module) -> set[str]:
    """List what a module defines or imports, wherever that stands outside functions and classes."""
    found = set[str]()
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Import(names=names) | ast.ImportFrom(names=names):
                    found |= {(alias.asname or alias.name).partition(".")[0] for alias in names}
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case _:
                    waiting.append(node)
    return found


@pytest.mark.timeout(20)
@pytest.mark.parametrize("module", sorted(TREES))
def test_names_that_a_benchmark_imports_from_another_one_exist(module: str) -> None:
    missing = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("benchmarks.")
        for alias in node.names
        if alias.name not in list_names(TREES[node.module.removeprefix("benchmarks.")])
    ]
    assert not missing

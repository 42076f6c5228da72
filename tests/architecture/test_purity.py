"""Tests of what no linter sees: the core does not await, hash, walk a set or compute with floats."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.parsed import parse_module

ROOT = Path(__file__).parents[2]
CORE = sorted([*ROOT.glob("states/**/*.py"), *ROOT.glob("effects/**/*.py")])
BANNED = {"hash", "id", "open", "print", "input", "eval", "exec", "globals", "vars", "setattr", "delattr"}


def is_a_set(node: ast.expr) -> bool:
    match node:
        case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case _:
            return False


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Await() | ast.AsyncFunctionDef() | ast.Global() | ast.Nonlocal():
                yield f"line {node.lineno}: {type(node).__name__}"
            case ast.Call(func=ast.Name(id=called)) if called in BANNED:
                yield f"line {node.lineno}: {called}()"
            case ast.For(iter=walked) | ast.comprehension(iter=walked) if is_a_set(walked):
                yield f"line {walked.lineno}: walks a set, whose order is not a fact"
            case ast.Constant(value=float()):
                yield f"line {node.lineno}: a float; count in integers"
            case ast.BinOp(op=ast.Div()) | ast.AugAssign(op=ast.Div()):
                yield f"line {node.lineno}: a division into a float; use //"
            case _:
                pass


def test_the_core_is_pure() -> None:
    found = [(str(path.relative_to(ROOT)), offence) for path in CORE for offence in offences(parse_module(path))]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "async def f(): ...",
        "def f():\n global x",
        "hash(1)",
        "print(1)",
        "for x in {1, 2}: ...",
        "[x for x in set(y)]",
        "x = 0.5",
        "x = y / 2",
        "x /= 2",
    ],
)
def test_an_offence_is_seen(source: str) -> None:
    assert list(offences(ast.parse(source)))


def test_the_core_runs_without_any_of_the_outside() -> None:
    """Replay needs no model: importing the fold brings in no torch, no event loop, no files, no threads."""
    found = (
        "import sys; before = set(sys.modules); import states.world, states.invariants, states.diagram;"
        "outside = {'torch', 'anyio', 'numpy', 'aiofiles', 'zstandard', 'starlette', 'random', 'secrets', 'socket'};"
        "print(*sorted(outside & (set(sys.modules) - before)))"
    )
    answer = subprocess.run([sys.executable, "-c", found], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == ""


def test_the_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    answer = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr

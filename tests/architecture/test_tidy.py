"""The house rules that can be read off the source text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.parsed import parse_module, read_module, walk_module

ROOT = Path(__file__).parents[2]
PACKAGES = ("effects", "states", "engine", "adapters")
CODE = sorted(path for package in (*PACKAGES, "training") for path in (ROOT / package).glob("**/*.py"))
ALL = sorted([*CODE, *(ROOT / "tests").glob("**/*.py"), *(ROOT / "benchmarks").glob("**/*.py")])
UNFINISHED = ("TO" + "DO", "FIX" + "ME", "X" + "XX", "NotImplemented" + "Error")
BROAD = {"Exception", "BaseException"}
OTHER_IMPORT = re.compile(r"^\s*from (?:\.|[^\n]*\bimport\s*\(?\s*\*)", re.MULTILINE)
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def broad_handlers(path: Path) -> Iterator[int]:
    """Lines that catch everything; cleaning up and raising again is something else."""
    for node in walk_module(path):
        if isinstance(node, ast.ExceptHandler) and not (isinstance(node.body[-1], ast.Raise) and not node.body[-1].exc):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(one is None or (isinstance(one, ast.Name) and one.id in BROAD) for one in caught):
                yield node.lineno


def test_every_file_says_in_its_first_line_what_it_is_for() -> None:
    silent = [
        name(path)
        for path in CODE
        if not ast.get_docstring(parse_module(path)) or not read_module(path).startswith('"""')
    ]
    assert not silent


def test_nothing_is_left_unfinished() -> None:
    assert not [(name(path), word) for path in CODE for word in UNFINISHED if word in read_module(path)]


def test_imports_are_absolute_and_by_name() -> None:
    suspect = [path for path in ALL if OTHER_IMPORT.search(read_module(path))]  # parsing all files takes seconds
    imports = [(path, node) for path in suspect for node in walk_module(path) if isinstance(node, ast.ImportFrom)]
    assert not [(name(path), node.lineno) for path, node in imports if node.level]
    assert not [(name(path), node.lineno) for path, node in imports if "*" in {alias.name for alias in node.names}]


def test_no_file_knows_whose_machine_it_was_written_on() -> None:
    assert not [name(path) for path in ALL if re.search(r"/(?:home|Users|root|work)/\w+/", read_module(path))]


def test_failures_are_caught_broadly_in_one_place_of_the_engine() -> None:
    """Broad handlers stand where executors are called. Everywhere else an exception is a bug and stops the engine."""
    broad = [name(path) for path in CODE if path.is_relative_to(ROOT / "engine") for _ in broad_handlers(path)]
    assert broad == ["engine/core/event_loop.py"]


def test_the_core_catches_nothing() -> None:
    core = [path for path in CODE if path.parent.name in ("states", "effects")]
    assert not [name(path) for path in core for node in walk_module(path) if isinstance(node, ast.Try)]


def test_one_class_name_means_one_thing_in_the_whole_tree() -> None:
    places: dict[str, list[Path]] = {}
    for path in ALL:
        for found in CLASS.findall(read_module(path)):
            places.setdefault(found, []).append(path)
    several = {each: found for each, found in places.items() if len(found) > 1}
    defined = {each: [name(path) for path in found if each in class_names(path)] for each, found in several.items()}
    assert {each: found for each, found in defined.items() if len(found) > 1} == {}


def class_names(path: Path) -> set[str]:
    """Return the classes of a module. `CLASS` also finds those in texts that a test runs."""
    return {node.name for node in parse_module(path).body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("line", ["from . import states", "    from ..states import table", "from states import *"])
def test_imports_that_are_relative_or_of_everything_are_looked_at(line: str) -> None:
    assert OTHER_IMPORT.search(f"import re\n{line}\n")


def test_no_file_that_ships_is_long() -> None:
    long = {name(path): len(read_module(path).splitlines()) for path in CODE if "training" not in path.parts}
    assert {path: lines for path, lines in long.items() if lines > 350} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_stay_small(package: str) -> None:
    """A kernel for a GPU is one function, however long: what it shares with others is inlined when it is compiled."""
    for path in (ROOT / package).glob("**/*.py"):
        for node in walk_module(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
                assert (node.end_lineno or 0) - node.lineno < 70, f"{name(path)}: {node.name}"


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether Triton compiles a function: `@triton.jit`, `@gluon.jit(...)`."""
    return any(re.match(r"(triton|gluon)\.jit\b", ast.unparse(each)) for each in node.decorator_list)

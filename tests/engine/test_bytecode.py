"""Methods of classes are compiled once, and not by each process again."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from engine import bytecode
from engine.bytecode import Bytecode, read

ROOT = Path(__file__).parents[2]
CLASSES = """
import json, sys
from pathlib import Path
from engine.bytecode import OWN, Bytecode
OWN.keep()
own = Bytecode(Path(sys.argv[1]))
own.begin()
from dataclasses import dataclass, field, fields
import attrs
@attrs.frozen
class Point:
    x: int
    y: "int" = 2
@attrs.define
class Box:
    points: list = attrs.field(factory=list)
@dataclass(order=True)
class Range:
    start: int
    stop: int = field(default=5)
found = {
    "equal": [Point(1) == Point(1, 2), hash(Point(1)) == hash(Point(1, 2)), Point(1) != Point(2), Range(1) < Range(2)],
    "told": [repr(Point(1)), repr(Box([Point(3)])), repr(Range(1))],
    "annotated": [str(Point.__init__.__annotations__), str(Range.__init__.__annotations__), str(fields(Range)[0].type)],
    "new": own.new,
}
own.keep()
print(json.dumps(found))
"""


def made(path: Path, **environment: str) -> dict[str, Any]:
    """By a process of its own."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", CLASSES, str(path)]
    done = subprocess.run(command, cwd=ROOT, env={**own, **environment}, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_second_process_compiles_nothing_and_its_classes_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "of" / "its" / "own" / "methods.pyc"
    first = made(path)
    assert first["new"] >= 8
    second = made(path)
    assert second == {**first, "new": 0}
    assert first["equal"] == [True] * 4
    assert first["told"] == ["Point(x=1, y=2)", "Box(points=[Point(x=3, y=2)])", "Range(start=1, stop=5)"]
    assert [one.name for one in path.parent.iterdir()] == ["methods.pyc"]


def test_classes_are_those_that_are_made_without(tmp_path: Path) -> None:
    without = CLASSES.replace("own.begin()", "")
    done = subprocess.run(
        [sys.executable, "-c", without, str(tmp_path / "x")], cwd=ROOT, capture_output=True, check=True
    )
    assert {**made(tmp_path / "methods.pyc"), "new": 0} == json.loads(done.stdout)


def test_nothing_is_written_where_python_writes_none(tmp_path: Path) -> None:
    path = tmp_path / "methods.pyc"
    assert made(path, PYTHONDONTWRITEBYTECODE="1")["new"] >= 8
    assert not path.exists()


@pytest.mark.parametrize("where", [0, 10, 60, -1])
def test_what_is_damaged_is_not_read_and_is_written_anew(where: int, tmp_path: Path) -> None:
    path = tmp_path / "methods.pyc"
    first = made(path)
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    assert read(path) == {}
    assert made(path) == first
    assert made(path)["new"] == 0


@pytest.mark.parametrize("content", [b"", b"x", None])
def test_what_is_no_file_of_it_is_not_read(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "methods.pyc"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    assert read(path) == {}


def test_a_folder_that_may_not_be_written_to_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    own = Bytecode(tmp_path / "file" / "methods.pyc")
    own.compiled("1", "x", "eval")
    own.keep()
    assert (tmp_path / "file").read_text() == ""


def test_a_source_is_known_by_its_text_name_and_mode_and_not_by_the_salt_of_its_hash(tmp_path: Path) -> None:
    own, salted = Bytecode(tmp_path / "methods.pyc"), "hash((\n        {},\n        a,\n))"
    sources = [
        ("a = 1", "x", "exec"),
        ("a = 1", "y", "exec"),
        ("a = 2", "x", "exec"),
        ("1", "x", "eval"),
        ("1", "x", "exec"),
    ]
    codes = [own.compiled(*one) for one in sources]
    assert len({id(code) for code in codes}) == own.new == len(sources)
    assert [own.compiled(*one) for one in sources] == codes
    assert own.compiled(salted.format(-123), "x", "eval") is own.compiled(salted.format(77), "x", "eval")
    assert own.new == len(sources) + 1


def value(code: CodeType) -> object:
    return eval(code)  # noqa: S307 - what a test has compiled


def test_what_is_asked_in_another_way_is_compiled_as_it_is_asked(tmp_path: Path) -> None:
    own, found = Bytecode(tmp_path / "methods.pyc"), dict[str, Any]()
    assert value(own.compiled("1", "x", "eval", 0, True)) == 1
    assert value(own.compiled("2", "x", "eval", dont_inherit=True)) == 2
    assert value(own.compiled(b"3", "x", "eval")) == 3
    own.executed(compile("a = 4", "x", "exec"), found)
    assert own.new == 0
    own.executed("b = 5", {}, found)
    own.executed("c = 6", found)
    assert (found["a"], found["b"], found["c"], own.new) == (4, 5, 6, 2)


def test_the_file_has_the_rights_of_the_sources(tmp_path: Path) -> None:
    path, before = tmp_path / "methods.pyc", os.umask(0)
    try:
        own = Bytecode(path)
        own.compiled("1", "x", "eval")
        own.keep()
    finally:
        os.umask(before)
    rights = (ROOT / "engine" / "bytecode.py").stat().st_mode & 0o666
    assert path.stat().st_mode & 0o777 == rights | 0o200


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Path, "replace", full)
    own = Bytecode(tmp_path / "methods.pyc")
    own.compiled("1", "x", "eval")
    own.keep()
    assert list(tmp_path.iterdir()) == []


def test_beyond_a_number_only_what_was_asked_for_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytecode, "MOST", 3)
    path = tmp_path / "methods.pyc"
    for sources, left in (("12", 2), ("23", 3), ("34", 2)):
        own = Bytecode(path)
        for source in sources:
            own.compiled(source, "x", "eval")
        own.keep()
        assert len(read(path)) == left

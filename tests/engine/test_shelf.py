"""Modules come from one file only as Python itself would find them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.shelf import HEAD, CodeShelf

ROOT = Path(__file__).parents[2]
CODE = """
import json, sys
from pathlib import Path
sys.path[:0] = [sys.argv[2], sys.argv[3]]
sys.path.append(sys.argv[4])
sys.path.append(Path(sys.argv[4]))  # nobody's
from engine.shelf import CodeShelf
shelf = CodeShelf(Path(sys.argv[1]))
shelf.begin()
if sys.argv[5:]:
    import late
    shelf.keep()
    sys.exit()
import alone, whole, whole.part
from whole import inner
taken = sorted(shelf.taken)
kept = shelf.keep()
import importlib, inspect
import late
found = {
    "taken": taken,
    "kept": kept,
    "values": [alone.VALUE, whole.VALUE, whole.part.VALUE, inner.VALUE, late.VALUE],
    "files": [[Path(one.__file__).name, Path(one.__spec__.origin).name] for one in (alone, whole, whole.part)],
    "cached": [Path(one.__cached__).is_file() for one in (alone, whole.part)],
    "path": [Path(one).name for one in whole.__path__],
    "source": inspect.getsource(alone.told),
    "again": importlib.reload(alone).VALUE,
    "finders": sum(isinstance(one, CodeShelf) for one in sys.meta_path),
}
print(json.dumps(found))
"""
ALL = ["alone", "whole", "whole.inner", "whole.part"]
Start = Callable[..., dict[str, Any]]


def put(path: Path, value: int, seconds: int = 10**9) -> None:
    """Of a time that is long ago: Python's own files do not tell apart what was written within a second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"VALUE = {value}\ndef told():\n    return VALUE\n")
    os.utime(path, (seconds, seconds))


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    for name, value in (("alone", 1), ("whole/__init__", 2), ("whole/part", 3), ("whole/inner", 4), ("late", 5)):
        put(tmp_path / "modules" / f"{name}.py", value)
    (tmp_path / "first").mkdir()
    (tmp_path / "last").mkdir()
    return tmp_path / "modules"


@pytest.fixture
def start(tmp_path: Path, modules: Path) -> Start:
    """A process, which looks in `first` first, then in `modules`, and at last in `last`. less: it imports `late` alone,
    and says nothing.
    """

    def started(*less: str, **environment: str) -> dict[str, Any]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        folders = [str(tmp_path / "first"), str(modules), str(tmp_path / "last")]
        command = [sys.executable, "-c", CODE, str(tmp_path / "shelf"), *folders, *less]
        done = subprocess.run(command, cwd=ROOT, env={**own, **environment}, capture_output=True, text=True, check=True)
        found: dict[str, Any] = {} if less else json.loads(done.stdout)
        return found

    return started


def test_a_second_process_takes_them_and_they_are_the_same(start: Start) -> None:
    first, second = start(), start()
    assert (first.pop("taken"), second.pop("taken")) == ([], ALL)
    assert (first.pop("kept"), second.pop("kept")) == (True, False)
    assert first == second
    assert second["values"] == [1, 2, 3, 4, 5]
    assert second["files"] == [[name] * 2 for name in ("alone.py", "__init__.py", "part.py")]
    assert second["cached"] == [True, True]
    assert second["path"] == ["whole"]
    assert (second["source"], second["again"]) == ("def told():\n    return VALUE\n", 1)
    assert second["finders"] == 0, "it looks no longer when all is kept"


def test_of_a_source_that_has_changed_nothing_is_taken_until_it_is_kept_again(start: Start, modules: Path) -> None:
    start()
    put(modules / "whole" / "part.py", 30, 2 * 10**9)
    found = start()
    assert (found["taken"], found["values"]) == (["alone", "whole", "whole.inner"], [1, 2, 30, 4, 5])
    assert start()["taken"] == ALL


def test_who_is_in_the_way_since_is_found(start: Start, modules: Path, tmp_path: Path) -> None:
    """Where Python would look before: in a folder ahead, or as a package beside the file."""
    start()
    put(tmp_path / "first" / "alone.py", 10)
    put(modules / "whole" / "part" / "__init__.py", 30)
    found = start()
    assert found["values"] == [10, 2, 30, 4, 5]
    assert found["taken"] == []
    found = start()
    assert (found["values"], found["taken"]) == ([10, 2, 30, 4, 5], ALL)


def test_nor_does_a_start_in_between_that_has_no_use_for_it_vouch_for_what_was(
    start: Start, modules: Path, tmp_path: Path
) -> None:
    start()
    put(tmp_path / "first" / "alone.py", 10)
    put(modules / "whole" / "part" / "__init__.py", 30)
    start("less")
    assert start()["values"] == [10, 2, 30, 4, 5]
    assert start()["values"] == [10, 2, 30, 4, 5]


def test_what_comes_behind_is_in_nobodys_way(start: Start, tmp_path: Path) -> None:
    start()
    put(tmp_path / "last" / "alone.py", 10)
    found = start()
    assert (found["values"], found["taken"]) == ([1, 2, 3, 4, 5], ALL)


def test_who_is_gone_is_not_found(start: Start, modules: Path) -> None:
    start()
    (modules / "whole" / "part.py").unlink()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        start()
    assert "No module named 'whole.part'" in failed.value.stderr


@pytest.mark.parametrize("keep", [0, 3, HEAD - 1, HEAD, HEAD + 100, -1], ids=str)
def test_a_file_that_is_not_whole_is_none_and_replaced(start: Start, tmp_path: Path, keep: int) -> None:
    start()
    path = tmp_path / "shelf"
    path.write_bytes(path.read_bytes()[:keep])
    found = start()
    assert (found["taken"], found["values"]) == ([], [1, 2, 3, 4, 5])
    assert start()["taken"] == ALL


@pytest.mark.parametrize("at", [0, 10, HEAD - 41, HEAD - 9, *range(HEAD - 8, HEAD), HEAD + 10])
def test_nor_is_one_of_another_python_or_with_another_index(start: Start, tmp_path: Path, at: int) -> None:
    start()
    path = tmp_path / "shelf"
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)
    found = start()
    assert (found["taken"], found["values"]) == ([], [1, 2, 3, 4, 5])
    assert start()["taken"] == ALL


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_code_that_is_none_is_taken_from_where_python_has_it(start: Start, tmp_path: Path, cut: int) -> None:
    start()
    path = tmp_path / "shelf"
    content = path.read_bytes()
    path.write_bytes(content[:-cut] + bytes(cut))
    assert start()["values"] == [1, 2, 3, 4, 5]


def test_who_has_not_begun_keeps_nothing(tmp_path: Path) -> None:
    shelf = CodeShelf(tmp_path / "shelf")
    shelf.keep()
    assert not shelf.path.exists()


def test_another_threads_search_goes_on_while_it_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = CodeShelf(tmp_path / "shelf")
    monkeypatch.setattr(sys, "meta_path", [shelf, *sys.meta_path])
    searching = sys.meta_path
    shelf.close()
    assert shelf in searching
    assert shelf not in sys.meta_path
    assert shelf.find_spec("json", None) is None


def test_nothing_is_written_where_python_is_told_to_write_none_and_all_is_taken(start: Start, tmp_path: Path) -> None:
    start(PYTHONDONTWRITEBYTECODE="1")
    assert not (tmp_path / "shelf").exists()
    start()
    assert start(PYTHONDONTWRITEBYTECODE="1")["taken"] == ALL


def test_a_start_that_finds_all_writes_nothing(start: Start, tmp_path: Path) -> None:
    """Nor one that has modules which could not be taken: a package's that is looked for in several folders."""
    put(tmp_path / "last" / "wide" / "more.py", 6)
    (tmp_path / "modules" / "alone.py").write_text(
        "import wide\nwide.__path__.append(sys.argv[4] + '/wide')\nimport wide.more\n"
    )
    put(tmp_path / "modules" / "wide" / "__init__.py", 7)
    source = (
        "import sys\n" + (tmp_path / "modules" / "alone.py").read_text() + "VALUE = 1\ndef told():\n    return VALUE\n"
    )
    (tmp_path / "modules" / "alone.py").write_text(source)
    start()
    before = (tmp_path / "shelf").stat().st_mtime_ns
    assert start()["taken"] == sorted([*ALL, "wide"])
    assert (tmp_path / "shelf").stat().st_mtime_ns == before


def test_where_it_may_not_be_written_there_is_none(start: Start, tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    assert start()["values"] == [1, 2, 3, 4, 5]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("shelf")] == ["shelf"]

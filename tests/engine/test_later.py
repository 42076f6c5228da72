"""What is imported later is there, whole, for whoever asks for something in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest

from engine.later import Finder, import_later


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """That of a name which is imported later, by its parent, too, and counts how often it is executed."""
    folder = tmp_path / "parent"
    folder.mkdir()
    (folder / "__init__.py").write_text("runs = []\nfrom parent import child\n")
    (folder / "user.py").write_text("import parent\nseen = [*parent.runs]\n")
    (folder / "child.py").write_text(
        "import time, parent\nparent.runs.append(1)\ntime.sleep(0.1)\nvalue = 5\n"
        "absent = hasattr(parent.child, 'absent')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    import_later("parent.child", ["parent.user"])
    yield folder
    for name in ("parent", "parent.child", "parent.user"):
        sys.modules.pop(name, None)


def test_it_is_executed_once_and_not_before_something_in_it_is_asked_for(package: Path) -> None:
    parent = import_module("parent")
    child = import_module("parent.child")
    assert parent.child is child
    assert child.__spec__.origin == str(package / "child.py")
    assert parent.runs == []
    assert (child.value, child.value) == (5, 5)
    assert parent.runs == [1]
    assert child.absent is False
    with pytest.raises(AttributeError, match="nothing"):
        _ = child.nothing
    assert parent.runs == [1]


def test_who_needs_it_without_asking_has_it_executed_first(package: Path) -> None:
    parent = import_module("parent")
    assert parent.runs == []
    assert import_module("parent.user").seen == [1]
    assert import_module("parent.child").value == 5
    assert parent.runs == [1]


def test_who_asks_while_another_thread_executes_it_waits(package: Path) -> None:
    child = import_module("parent.child")
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(lambda _: child.value, range(4))] == [5] * 4
    assert sys.modules["parent"].runs == [1]


def test_what_is_not_there_is_asked_for_in_vain(package: Path) -> None:
    assert Finder("parent.none").find_spec("parent.none", [str(package)]) is None
    assert Finder("parent.none").find_spec("parent.child", [str(package)]) is None
    with pytest.raises(ModuleNotFoundError):
        import_module("parent.none")

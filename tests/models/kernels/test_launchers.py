"""Extension modules of one name that several threads load: each keeps its own."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from adapters.models.kernels.cuda.compilation.launchers import Load, load_separately


def shared() -> Load:
    """Return a loader that behaves as Python with a single-phase module that was loaded before: it fills one object,
    which others hold too.
    """
    module = SimpleNamespace()

    def load(name: str, path: str) -> SimpleNamespace:
        vars(module).clear()
        vars(module).update(__name__=name, launch=path)
        time.sleep(0)  # another thread may load meanwhile
        return module

    return load


def test_a_launcher_stays_the_one_that_was_loaded() -> None:
    assert shared()("launcher", "a").launch == "a"
    load = shared()
    first, second = load("launcher", "a"), load("launcher", "b")
    assert (first.launch, second.launch) == ("b", "b")  # so it is without
    load = load_separately(shared())
    first, second = load("launcher", "a"), load("launcher", "b")
    assert (first.launch, second.launch) == ("a", "b")


def test_what_is_there_is_not_loaded_again() -> None:
    loaded = list[str]()

    def load(name: str, path: str) -> SimpleNamespace:
        loaded.append(f"{name} {path}")
        return SimpleNamespace(launch=path)

    found = load_separately(load)
    assert [found(*one).launch for one in (("x", "a"), ("x", "b"), ("x", "a"), ("y", "a"))] == ["a", "b", "a", "a"]
    assert loaded == ["x a", "x b", "y a"]


def test_threads_get_their_own() -> None:
    load = load_separately(shared())
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: load("launcher", str(number)).launch, range(2000)))
    assert found == [str(number) for number in range(2000)]


SOURCE = """
#include <Python.h>
static PyObject *value(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"value", value, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "one_name", NULL, -1, methods};
PyMODINIT_FUNC PyInit_one_name(void) { return PyModule_Create(&module); }
"""


def test_modules_that_triton_builds_are_kept_apart(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("triton.runtime.build", reason="Triton comes with CUDA builds of torch")
    import adapters.models.kernels.cuda.compilation.compile  # noqa: F401, PLC0415 - changes how they are loaded

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def made(number: int) -> SimpleNamespace:
        return build.compile_module_from_src(SOURCE % number, "one_name")

    first = [made(number) for number in (1, 2)]
    again = [made(number) for number in (1, 2)]  # now they are known
    assert [one.value() for one in (*first, *again)] == [1, 2, 1, 2]

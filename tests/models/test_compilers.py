"""Kernels compiled by other processes: what is asked of them, what comes of it, and that whoever launches finds it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.models.kernels.compilers import all_done
from adapters.models.kernels.digests import known_first

COMPILER = """
import os, sys
for line in sys.stdin:
    word = line.strip()
    if word == "die":
        os._exit(3)
    with open({told!r}, "a") as told:
        told.write(f"{{os.getpid()}} {{word}}\\n")
    print("" if word != "odd" else "ValueError: odd", flush=True)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """A compiler of words, as `pretended`; what its processes did so far."""
    told = tmp_path / "told"
    told.touch()
    (tmp_path / "pretended.py").write_text(COMPILER.format(told=str(told)))
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda: [line.split() for line in told.read_text().splitlines()]


def test_every_line_is_done_once_by_as_many_processes_as_there_are_processors(
    module: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    lines = [f"line-{number}" for number in range(40)]
    assert all_done(lines, "pretended") == []
    assert sorted(word for _, word in module()) == sorted(lines)
    assert len({process for process, _ in module()}) <= 3
    assert all_done([], "pretended") == []


def test_what_was_not_done_is_told_and_the_rest_is_done(module: Callable[[], list[list[str]]]) -> None:
    assert all_done(["a", "odd", "b"], "pretended") == ["ValueError: odd"]
    assert sorted(word for _, word in module()) == ["a", "b", "odd"]


def test_a_process_that_ends_leaves_the_rest_to_others_and_none_are_waited_for(
    module: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert all_done(["a", "die", "b"], "pretended") == ["its process ended: die", "nobody was left for: b"]
    assert [word for _, word in module()] == ["a"]
    assert all_done(["a"], "no.such.module") == ["its process ended: a"]
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    [why] = all_done(["a"], "pretended")[:1]
    assert "/no/such/python" in why


def test_a_digest_knows_what_another_function_uses_whoever_asked_first() -> None:
    class Function:
        def __init__(self) -> None:
            self.used: dict[str, int] = {}

        @property
        def cache_key(self) -> str:
            self.used["LIMIT"] = 3
            return "digest"

    def update(finder: dict[str, int], function: Function) -> None:
        finder.update(function.used)
        _ = function.cache_key

    function, first, later = Function(), dict[str, int](), dict[str, int]()
    update(first, function)
    update(later, function)
    assert (first, later) == ({}, {"LIMIT": 3})  # so it is without
    first.clear()
    known_first(update)(first, Function())
    assert first == later


@pytest.fixture
def pretended_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Triton, with an empty cache and a GPU of compute capability 9.0 that nobody has."""
    triton = pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch")
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.runtime import driver  # noqa: PLC0415

    target = GPUTarget("cuda", 90, 32)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    how = {"device": 77, "target": target, "stream": 0}  # the stream of a device
    fake = {f"get_current_{name}": lambda *_, found=found: found for name, found in how.items()}
    monkeypatch.setattr(driver, "_active", SimpleNamespace(**fake))
    return triton


def test_what_is_compiled_apart_is_found_by_who_launches_it(pretended_gpu: Any) -> None:
    apart = importlib.import_module("adapters.models.kernels.triton_apart")
    launch = importlib.import_module("adapters.models.kernels.triton_launch")
    picking = importlib.import_module("adapters.models.kernels.triton.picking")
    rows = importlib.import_module("adapters.models.kernels.triton.rows")
    numbers, logits = torch.zeros(64, dtype=torch.int64), torch.zeros(4, 1024)

    def steps() -> None:
        for _ in range(2):
            launch.launch(rows.bring_table, (1,), numbers, numbers, numbers, 0, 64, BLOCK=128, num_warps=1)
        how = {"BLOCK": 1024, "num_warps": 8, "enable_fp_fusion": False}
        wide = logits, logits.double(), numbers, logits.double(), numbers, numbers, 1024, 1024, 1
        launch.launch(picking.part_weights, (4, 1), *wide, **how)

    with apart.asking() as asked:
        steps()
    assert len(asked.lines) == 2
    longest, shortest = sorted(asked.lines.values(), reverse=True)
    assert longest > shortest
    found, hook = [], pretended_gpu.knobs.runtime.jit_cache_hook
    assert hook is None
    pretended_gpu.knobs.compilation.listener = lambda **about: found.append(about["cache_hit"])
    try:
        apart.compile_apart(asked)
        assert not found  # not by this process
        with launch.withholding():
            steps()
    finally:
        pretended_gpu.knobs.compilation.listener = None
    assert found == [True, True]

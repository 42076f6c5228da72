"""Tests of kernels that other processes compile: what these are asked for, what they return, and that every launch
finds it.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.models.kernels.cuda.compilation import worker_pool
from adapters.models.kernels.cuda.compilation.digests import hash_callees_first
from adapters.models.kernels.cuda.compilation.worker_pool import run_lines

COMPILER = r"""
import os, sys, time
for line in sys.stdin:
    word = line.strip()
    if word == "die":
        os._exit(3)
    with open({told!r}, "a") as told:
        told.write(f"{{os.getpid()}} {{word}}\n")
    until = time.monotonic() + 30
    while word.startswith("all-of-") and time.monotonic() < until:
        if len({{line.split()[0] for line in open({told!r}) if word in line}}) == int(word[7:]):
            break
    if word == "short":
        time.sleep(0.1)
    if word == "hang":
        time.sleep(600)
    if word == "partial":
        os.write(1, b"oops")
        os._exit(0)
    if word == "bytes":
        os.write(1, bytes([255, 254, 10]))
    elif word == "stay":
        print(flush=True)
        time.sleep(600)
    else:
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
    monkeypatch.setattr(worker_pool, "count_processors", lambda: 3)
    lines = [f"line-{number}" for number in range(40)]
    assert run_lines(lines, "pretended") == []
    assert sorted(word for _, word in module()) == sorted(lines)
    assert run_lines(["all-of-3"] * 3, "pretended") == []
    assert len({process for process, word in module() if word == "all-of-3"}) == 3
    assert run_lines([], "pretended") == []


def test_what_was_not_done_is_told_and_the_rest_is_done(module: Callable[[], list[list[str]]]) -> None:
    assert run_lines(["a", "odd", "b"], "pretended") == ["ValueError: odd"]
    assert sorted(word for _, word in module()) == ["a", "b", "odd"]


def test_an_answer_that_is_no_text_is_told_and_who_never_answers_is_ended(
    module: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_lines(["bytes", "a"], "pretended") == ["\ufffd\ufffd"]
    monkeypatch.setattr(worker_pool, "PATIENCE_S", 2.0)
    monkeypatch.setattr(worker_pool, "LEAVE_S", 0.5)
    assert run_lines(["hang", "b"], "pretended") == ["its process ended: hang"]
    assert run_lines(["stay"], "pretended") == [], "what it did is done, and it is ended"
    assert sorted(word for _, word in module()) == ["a", "b", "bytes", "hang", "stay"]


def test_a_process_that_ends_leaves_the_rest_to_others_and_none_are_waited_for(
    module: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "count_processors", lambda: 1)
    assert run_lines(["a", "die", "b"], "pretended") == ["its process ended: die", "no process was left for: b"]
    assert [word for _, word in module()] == ["a"]
    assert run_lines(["partial", "b"], "pretended") == ["its process ended: partial", "no process was left for: b"]
    assert run_lines(["a"], "no.such.module") == ["its process ended: a"]
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    [why] = run_lines(["a"], "pretended")[:1]
    assert "/no/such/python" in why


def test_they_end_with_who_asked_even_if_that_one_is_killed(module: Callable[[], list[list[str]]]) -> None:
    asks = (
        "import sys; from adapters.models.kernels.cuda.compilation.worker_pool import run_lines;"
        " run_lines(['short'] * 400, 'pretended')"
    )
    path = os.pathsep.join(one or str(Path.cwd()) for one in sys.path)
    with subprocess.Popen([sys.executable, "-c", asks], env={**os.environ, "PYTHONPATH": path}) as asker:
        until = time.monotonic() + 30
        while not module() and time.monotonic() < until:
            time.sleep(0.02)
        asker.kill()
    workers_of = {int(process) for process, _ in module()}
    assert workers_of
    while any(map(runs, workers_of)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(runs, workers_of))


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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
    hash_callees_first(update)(first, Function())
    assert first == later


@pytest.fixture
def pretended_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set up Triton with an empty cache and a GPU of compute capability 9.0 that does not exist."""
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
    apart = importlib.import_module("adapters.models.kernels.cuda.compilation.compile_ahead")
    launch = importlib.import_module("adapters.models.kernels.triton_launch")
    picking = importlib.import_module("adapters.models.kernels.triton.draw_kernel")
    rows = importlib.import_module("adapters.models.kernels.triton.rows")
    numbers, logits = torch.zeros(64, dtype=torch.int64), torch.zeros(4, 1024)

    def steps() -> None:
        for _ in range(2):
            launch.launch(rows.bring_table, (1,), numbers, numbers, numbers, 0, 64, BLOCK=128, num_warps=1)
        how = {"BLOCK": 1024, "num_warps": 8, "enable_fp_fusion": False}
        wide = logits, logits.double(), numbers, logits.double(), numbers, numbers, 1024, 1024, 1
        launch.launch(picking.part_weights, (4, 1), *wide, **how)

    with apart.collect_requests() as asked, ThreadPoolExecutor(1) as other:
        steps()
        heard = [bool(pretended_gpu.knobs.runtime.jit_cache_hook)]
        heard.append(other.submit(lambda: bool(pretended_gpu.knobs.runtime.jit_cache_hook)).result())
    assert heard == [True, False], "other threads are not heard, and do not have to write constants down"
    assert len(asked.lines) == 2
    longest, shortest = sorted(asked.lines.values(), reverse=True)
    assert longest > shortest
    found = list[bool]()
    assert not pretended_gpu.knobs.runtime.jit_cache_hook
    pretended_gpu.knobs.compilation.listener = lambda **about: found.append(about["cache_hit"])
    try:
        asked.compile_in_processes()
        assert not found  # not by this process
        with launch.withhold_launches():
            steps()
    finally:
        pretended_gpu.knobs.compilation.listener = None
    assert found == [True, True]

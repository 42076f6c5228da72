"""Results are well-formed, say whether goals are met, and every benchmark writes one."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import (
    Figure,
    Goal,
    Machine,
    Result,
    decode_result,
    encode_result,
    name_machine,
    publish,
    read_results,
)

FOLDER = Path(results.__file__).parent
TOOLS = {
    "report",
    "chart",
    "screenshots",
    "text_server",
    "widened",
    "packed_files",
    "packed_folders",
}  # these make something, and measure nothing
RUN = """
import runpy, sys
from pathlib import Path
from benchmarks import results
results.FOLDER = Path(sys.argv.pop(1))
sys.argv[0] = name = sys.argv.pop(1)
try:
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
"""
QUICK = ("engine_fold --finished 100 --steps 40",)
SLOW = (
    "store_index --entries 20 --runs 1",
    "scope_windows",
    "cuda_store --device cpu --tiny --tokens 512 --runs 1",
    "engine_overhead --steps 200 --rounds 1",
    "write_files --mib 1 --pairs 1",
    "host_experts --shape small --device cpu --gib 0.01 --reports 1 --steps 2 --cpu-layers 1 --draws 1",
    "experts --rounds 1",
    "beside_prefill --streams 1 --prompt 512",
    "compression --tokens 500 --runs 1",
    "compression_off",
    "constrained --schemas 2 --streams 1",
    "cpu_model --tokens 4 --repeat 1 --prompts 64 --dtypes float32",
    "exactness --prompts 2",
    "exactness_families --cases qwen2:Q8_0 --prompts 2 --longest 100 --answer 4",
    "first_requests --tokens 512 --modes recompute,planner",
    "first_token --lengths 64 --runs 1",
    "held_out demo demo:int8 --tokens 256 --run 128",
    "hostile_bodies --mib 1 --times 1 --only NaN",
    "kv_needles --lengths 512 --questions 1 --kv-dtypes auto,int8",
    "kv_rows --shape demo --device cpu --contexts 256",
    "native --rounds 1 --steps 2",
    "never_slower --parts streams --streams 1 --repeats 1 --tokens 8",
    "peer --rounds 1 --levels 1 --lengths 64 --prompts 32 --answers 4",
    "prefix_hit demo --tokens 800 --rounds 1",
    "remote_hop --steps 5",
    "restart --runs 1 --tokens 512 --codecs store",
    "soak --minutes 0.5 --rate 1",
    "speculation --prompts 1 --tokens 16",
    "speculation_served --prompts 1 --rounds 1",
    "split_restore --tokens 1000 --times 2",
    "split_serve --near 64 --tokens 1000 --answers 8",
    "startup --runs 1",
    "window_restart --tokens 1500",
)


def make_figure(ours: float | None, goal: Goal | None, **peers: float) -> Figure:
    return Figure("decode", "a model", "2k", "tok/s", ours, peers, goal)


def make_result(*figures: Figure) -> Result:
    machine = Machine("epyc-avx2-2", "AMD EPYC", ["avx2"], 2, 2)
    return Result("steps", "python -m benchmarks.steps", "abc1234", "2026-11-28", machine, {}, list(figures), None)


@pytest.mark.parametrize(
    ("ours", "goal", "met"),
    [
        (2.0, Goal(at_least=2), True),
        (1.9, Goal(at_least=2), False),
        (2.0, Goal(at_most=2), True),
        (2.1, Goal(at_most=2), False),
        (245.0, Goal(at_least=1, against="vLLM"), True),
        (188.0, Goal(at_least=1, against="vLLM"), False),
        (194.0, Goal(at_most=1.03, against="vLLM"), True),
        (2.0, None, None),
        (None, Goal(at_least=2), None),
    ],
)
def test_a_figure_says_whether_its_goal_is_met(ours: float | None, goal: Goal | None, met: bool | None) -> None:
    assert make_figure(ours, goal, vLLM=189.0).met is met


def test_a_result_survives_its_file() -> None:
    result = make_result(make_figure(2.0, Goal(at_least=2)), make_figure(None, None))
    assert decode_result(encode_result(result)) == result
    assert json.loads(encode_result(result))["figures"][0]["met"] is True


def test_a_verdict_that_contradicts_its_figure_is_refused() -> None:
    text = encode_result(make_result(make_figure(1.0, Goal(at_least=2)))).replace('"met": false', '"met": true')
    with pytest.raises(Exception, match="While structuring Result"):
        decode_result(text)


@pytest.mark.parametrize(
    "change", [('"promise": "decode"', '"promise": "beauty"'), ('"commit"', '"comit"'), ('"at_least"', '"atleast"')]
)
def test_what_is_no_result_is_refused(change: tuple[str, str]) -> None:
    text = encode_result(make_result(make_figure(1.0, Goal(at_least=2))))
    with pytest.raises(Exception, match="While structuring Result"):
        decode_result(text.replace(*change))


def test_a_goal_has_one_bound() -> None:
    with pytest.raises(ValueError, match="one bound"):
        Goal()
    with pytest.raises(ValueError, match="one bound"):
        Goal(at_least=1, at_most=2)


def test_all_recorded_results_are_well_formed() -> None:
    found = read_results()
    assert len(found) > 50
    assert all(result.figures or result.raw for result in found)


@pytest.mark.parametrize(
    ("cpu", "features", "gpu", "gpus", "name"),
    [
        ("AMD EPYC 9654", ["avx2", "avx512_f", "avx512_bf16"], None, 0, "epyc-avx512bf16-2"),
        ("Intel(R) Xeon(R) Platinum", ["avx2", "avx512_f", "amx_bf16"], None, 0, "xeon-amx-2"),
        ("Intel(R) Xeon(R) Platinum", ["avx2", "amx_bf16"], "NVIDIA H200", 1, "h200"),
        ("Intel(R) Xeon(R) Platinum", ["avx2", "amx_bf16"], "NVIDIA H200", 2, "h200-x2"),
        ("", [], "NVIDIA H100 80GB HBM3", 1, "h100"),
        ("", [], "NVIDIA GeForce RTX 4090", 1, "rtx-4090"),
        ("Neoverse N1", [], None, 0, "neoverse-n1-scalar-2"),
    ],
)
def test_a_machine_is_named_by_its_kind(cpu: str, features: list[str], gpu: str | None, gpus: int, name: str) -> None:
    assert name_machine(cpu, features, 2, gpu, gpus) == name


def test_a_run_is_recorded_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["steps", "--record", "--llama", f"{tmp_path}/llama-server"])
    figures = [make_figure(1.0, Goal(at_least=2))]
    publish(Namespace(record=False), "steps", {"ms": [1, 2]}, figures, "cpu")
    assert not list(tmp_path.iterdir())
    missed, raw = capsys.readouterr().out.splitlines()
    assert missed == "missed: a model, 2k: 1 (goal 2)"
    assert json.loads(raw)["ms"] == [1, 2]
    publish(Namespace(record=True), "steps", {"ms": [1, 2]}, figures, "cpu")
    [result] = read_results(tmp_path)
    assert result.raw == {"ms": [1, 2]}
    assert result.figures == figures
    assert result.command is not None
    assert result.command.endswith(" --llama llama-server")
    assert result.machine.gpu is None
    assert result.versions["torch"]


# The sources of the modules that measure something when they are run, by name.
SOURCES = {
    file.stem: text
    for file in sorted(FOLDER.glob("*.py"))
    if "\ndef main(" in (text := file.read_text(encoding="utf-8")) and file.stem not in TOOLS
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_benchmark_records_its_result_under_its_name(name: str) -> None:
    calls = [node for node in ast.walk(ast.parse(SOURCES[name])) if isinstance(node, ast.Call)]
    called = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    assert called & {"benchmark_parser", "server_parser"}, "without --record"
    published = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "publish"]
    assert published, "nothing is published"
    assert all(name in ast.unparse(call.args[1]) or f'"{name}' in SOURCES[name] for call in published)


@pytest.mark.parametrize("words", QUICK, ids=lambda words: words.split()[0])
def test_a_quick_benchmark_writes_a_well_formed_result(words: str, tmp_path: Path) -> None:
    check_benchmark(words, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("words", SLOW, ids=lambda words: words.split()[0])
def test_every_other_benchmark_for_processors_does_so_too(words: str, tmp_path: Path) -> None:
    check_benchmark(words, tmp_path)


def check_benchmark(words: str, folder: Path) -> None:
    """Run a benchmark for a moment. Its figures say nothing, but its result must be whole."""
    name, *options = words.split()
    command = [sys.executable, "-c", RUN, str(folder), name, *options, "--record"]
    done = subprocess.run(command, check=False, cwd=FOLDER.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    [result] = read_results(folder)
    assert result.benchmark.startswith(name)
    assert result.raw
    assert result.date is not None
    assert result.machine.cores

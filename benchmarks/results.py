"""Benchmark results as data: what was run, where, what came of it, and which goals that meets.

Every benchmark ends with `publish`. With `--record` it writes `benchmarks/results/NAME-MACHINE.json`, and
`python -m benchmarks.report` makes docs/BENCHMARKS.md from those files. A file holds one run of one command: a new run
on the same machine replaces it. `figures` are the numbers that the page shows, `raw` is everything that was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from attrs import Attribute, Factory, asdict, define, field, frozen
from cattrs import Converter
from cattrs.gen import make_dict_unstructure_fn, override

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "results"

# These decide how products are computed, so figures of one kind of processor say nothing about another kind.
FEATURES = ("avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16")

PROMISES: Mapping[str, str] = {
    "cold": "First token, cold",
    "continued": "First token, continued",
    "restart": "First token after a restart",
    "decode": "Decode",
    "streams": "Streams",
    "agents": "Agents' sessions",
    "hybrid": "Hybrid models",
    "packed": "Packed weights and 8-bit rows",
    "split": "Split models",
    "speculation": "Speculation",
    "compression": "Prompt compression",
    "start": "Start",
    "memory": "Memory",
    "exactness": "Exactness",
    "service": "Serving under load",
}


@frozen
class Goal:
    """A bound that a figure must keep: on the figure itself, or on its ratio to the figure of the peer `against`."""

    at_least: float | None = None
    at_most: float | None = None
    against: str | None = None

    def __attrs_post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a goal has one bound")

    @property
    def bound(self) -> float:
        found = self.at_most if self.at_least is None else self.at_least
        assert found is not None
        return found

    def compare(self, ours: float, peers: Mapping[str, float]) -> float:
        """Return the number that the bound applies to."""
        return ours if self.against is None else ours / peers[self.against]

    def is_met(self, value: float) -> bool:
        return value <= self.bound if self.at_least is None else value >= self.bound


@define
class Figure:
    """One number of a run. `at` tells the figures of one subject apart (a length, a number of streams).

    `peers` are numbers of the same unit that were measured for comparison. `met` follows from the other fields. It is
    written for those who read the file, and is None where there is no goal or no number.
    """

    promise: str = field(validator=lambda _, __, value: check_promise(value))
    subject: str
    at: str
    unit: str
    ours: float | None
    peers: dict[str, float] = Factory(dict)
    goal: Goal | None = None
    note: str | None = None
    met: bool | None = field()

    @met.default
    def _judge(self) -> bool | None:
        return judge(self)

    @met.validator
    def _check_verdict(self, _: Attribute[Any], value: bool | None) -> None:
        if value != judge(self):
            raise ValueError(f"{self.subject}, {self.at}: met is {value}, but the figure says {judge(self)}")

    @property
    def compared(self) -> float | None:
        """The number that the goal is about."""
        if self.goal is None or self.ours is None:
            return None
        return self.goal.compare(self.ours, self.peers)


def check_promise(value: str) -> None:
    if value not in PROMISES:
        raise ValueError(f"{value} is no promise: {', '.join(PROMISES)}")


def judge(figure: Figure) -> bool | None:
    """Return whether a figure meets its goal, None where that cannot be said."""
    value = figure.compared
    return None if value is None or figure.goal is None else figure.goal.is_met(value)


@frozen
class Machine:
    """The machine of a run, as far as it explains figures. `name` is part of the file's name.

    cores: that the process may use, which are fewer than the machine has where `taskset` started it.
    """

    name: str
    cpu: str | None
    features: list[str]
    cores: int | None
    threads: int | None = None
    gpu: str | None = None
    gpus: int = 0


@frozen
class Result:
    """One run. None stands for what an older record does not tell."""

    benchmark: str
    command: str | None
    commit: str | None
    date: str | None
    machine: Machine
    versions: dict[str, str]
    figures: list[Figure]
    raw: Any
    note: str | None = None

    @property
    def name(self) -> str:
        return f"{self.benchmark}-{self.machine.name}"


def make_result_converter() -> Converter:
    """Make the converter of result files. It refuses keys that it does not know, and omits defaults but for `met`."""
    made = Converter(forbid_extra_keys=True, omit_if_default=True)
    kept = override(omit_if_default=False)
    made.register_unstructure_hook(
        Figure, make_dict_unstructure_fn(Figure, made, _cattrs_omit_if_default=True, met=kept)
    )
    return made


def encode_result(result: Result) -> str:
    return json.dumps(make_result_converter().unstructure(result), indent=1, ensure_ascii=False) + "\n"


def decode_result(text: str) -> Result:
    """Raises cattrs' and attrs' errors where the text is no well-formed result."""
    return make_result_converter().structure(json.loads(text), Result)


def read_results(folder: Path = FOLDER) -> list[Result]:
    """Read all result files, in the order of their names."""
    found = list[Result]()
    for file in sorted(folder.glob("*.json")):
        result = decode_result(file.read_text(encoding="utf-8"))
        if file.stem != result.name:
            raise ValueError(f"{file.name} holds the result {result.name}")
        found.append(result)
    return found


# --- what a run tells about itself ---


def read_cpu_model() -> str | None:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def describe_machine(device: str = "auto") -> Machine:
    """Describe this machine. `device` is where the benchmark computes: a GPU names the machine only if it is used."""
    kinds, cpu = torch.cpu.get_capabilities(), read_cpu_model()
    features = [name for name in FEATURES if kinds.get(name)]
    uses_gpu = torch.cuda.is_available() and not device.startswith("cpu")
    gpus = torch.cuda.device_count() if uses_gpu else 0
    gpu = torch.cuda.get_device_name() if uses_gpu else None
    cores = len(os.sched_getaffinity(0))
    name = name_machine(cpu or platform.machine(), features, cores, gpu, gpus)
    return Machine(name, cpu, features, cores, torch.get_num_threads(), gpu, gpus)


def name_machine(cpu: str, features: Sequence[str], cores: int, gpu: str | None, gpus: int) -> str:
    """Return a short name that tells kinds of machine apart: `h200`, `h200-x2`, `epyc-avx512bf16-2`."""
    if gpu is not None:
        model = re.sub(r"nvidia|geforce|\d+gb.*|pcie|sxm\d?", "", gpu.lower())
        return slug(model) + (f"-x{gpus}" if gpus > 1 else "")
    maker = next((word for word in ("epyc", "ryzen", "xeon", "core") if word in cpu.lower()), slug(cpu))
    widest = "amx" if "amx_bf16" in features else features[-1].replace("_", "") if features else "scalar"
    return f"{maker}-{widest}-{cores}"


def name_shape(shape: str) -> str:
    """Name a model of random weights, as figures name it."""
    return shape if shape == "demo" else f"{shape.upper()} shape"


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def describe_command() -> str:
    """Return the command of this process. Of a path that leads elsewhere only its last part says anything."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {module.name}" if module is not None else Path(sys.argv[0]).name
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:] if word != "--record"]
    return " ".join([program, *map(shlex.quote, words)])


def find_commit(checkout: Path = ROOT) -> str | None:
    """Return the commit that is checked out, with a plus sign where tracked files differ from it."""
    try:
        commit, changed = (
            subprocess.run(["git", *words], cwd=checkout, check=True, capture_output=True, text=True).stdout.strip()
            for words in (["rev-parse", "--short=7", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def publish(
    given: argparse.Namespace,
    benchmark: str,
    raw: Mapping[str, Any],
    figures: Sequence[Figure] = (),
    device: str = "auto",
) -> None:
    """Print which goals are met, then write the result where `--record` asks for it, or print its raw figures."""
    for figure in figures:
        if figure.met is not None and figure.compared is not None and figure.goal is not None:
            verdict = "met" if figure.met else "missed"
            print(f"{verdict}: {figure.subject}, {figure.at}: {figure.compared:.4g} (goal {figure.goal.bound:g})")
    machine = describe_machine(device)
    if not given.record:
        print(json.dumps({"benchmark": benchmark, "machine": asdict(machine), **raw}))
        return
    known = {"python": platform.python_version(), "torch": torch.__version__}
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    result = Result(benchmark, describe_command(), find_commit(), date, machine, known, list(figures), dict(raw))
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{result.name}.json"
    file.write_text(encode_result(result), encoding="utf-8")
    print(f"recorded in {file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}")

"""What the engine costs a decode step beside the model: fold, runner, hand-off to the lane and back, stream, per
request.

The shard here does nothing, so what is left of a decode step is the engine, its executor and sampling one argmax.
`python -m benchmarks.engine_overhead [--steps 3000]`; goal: at most 2 % of a 10 ms decode step, that is 200 us.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import anyio
import torch
from attrs import define, field
from torch import Tensor

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.models.decoder.shard import Kept, NamedTensors
from adapters.models.kernels.step import Forward, Step
from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median, print_table
from effects.job import Job
from effects.stream import EmitTokens
from engine.serving.wiring import run_engine
from states.settings import Settings

VOCABULARY = 4096


@define
class NoModel:
    """A shard that computes nothing: the same hidden states and logits for everything."""

    vocab_size: int = VOCABULARY
    state_specs: tuple[()] = ()
    slots: int = 8
    capacity: int = 1 << 16
    runs_ahead: bool = False
    layers: range = range(1)
    device: torch.device = field(factory=lambda: torch.device("cpu"))
    _hidden: Tensor = field(factory=lambda: torch.zeros(256, 8))
    _logits: Tensor = field(factory=lambda: torch.randn(16, VOCABULARY))

    def forward(self, step: Step, inputs: Tensor) -> Forward:
        assert len(inputs) == step.rows
        return Forward(self._hidden[: step.bucket], {})

    def commit(self, step: Step, kept: Sequence[Kept]) -> None:
        assert len(kept) == len(step.segments)

    def logits(self, step: Step, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]

    def copy_rows(self, source: int, target: int, count: int) -> None:
        assert source != target
        assert count

    def export_rows(self, slot: int, start: int, stop: int) -> NamedTensors:
        return {f"layers.{slot}.k": self._hidden[: stop - start]}

    def import_rows(self, slot: int, start: int, rows: NamedTensors) -> None:
        assert rows

    def memory(self) -> dict[str, int]:
        return {"weights": 0}

    def synchronize(self) -> None:
        """It is never behind."""

    def close(self) -> None:
        self._logits = self._hidden


async def decode_steps(requests: int, count: int) -> list[float]:
    """Microseconds between the tokens of one stream, while `requests` decode together."""
    lane = DeviceLane("cpu")
    executor = DeviceExecutor(ExecutorParts(NoModel(), (4, 8, 16, 256), lane=lane))
    gaps = list[float]()

    async def read(number: int) -> None:
        last = 0.0
        async for message in running.submissions.submit(Job(tuple(range(100 + number)), count)):
            if isinstance(message, EmitTokens):
                now = time.perf_counter()
                if last and number == 0:
                    gaps.append((now - last) * 1e6)
                last = now

    async with run_engine(Settings(slots=8), executor) as running, anyio.create_task_group() as tasks:
        for number in range(requests):
            tasks.start_soon(read, number)
    await anyio.to_thread.run_sync(executor.close)
    return gaps


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    given = parser.parse_args()
    count = given.steps
    rows: list[dict[str, Any]] = []
    for requests in (1, 4):
        gaps = sorted(anyio.run(decode_steps, requests, count))
        middle = median(gaps)
        row = {"requests": requests, "us_a_round": middle, "p95_us": gaps[int(len(gaps) * 0.95)]}
        rows.append({**row, "percent_of_10_ms": middle / 100})
    print_table("Engine, runner, hand-off and sampling, without a model (goal: 2 % of a 10 ms decode step)", rows)
    what, goal = "from token to token without a model", Goal(at_most=200)
    figures = [
        Figure("service", what, f"{row['requests']} requests", "us", row["us_a_round"], goal=goal) for row in rows
    ]
    publish(given, "engine_overhead", {"rows": rows, "rounds": count}, figures, "cpu")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

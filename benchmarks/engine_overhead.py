"""What the engine costs a decode step beside the model: fold, event loop, hand-off to the lane and back, streams.

The shard here does nothing, so what is left of a decode step is the engine, its executor and sampling one argmax for
each request. These are the figures for each number of requests:

* microseconds from token to token, which other programs on the machine disturb most;
* microseconds of processor time in a step, on both threads together;
* calls of functions in a step, which nothing disturbs. Calls of C functions count as well. Streams and lane wait for
  each other then, so that the event loop does not fall behind and take several steps at once.

Requests decode as on a GPU (*overlapped*: the next step is launched before the last one is read), or as on a CPU.
Threads may keep the interpreter as long as those of a server.
`python -m benchmarks.engine_overhead [--steps 3000]`; goals: 2 % of a 10 ms decode step for up to four requests, and
10 % for 64.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from types import FrameType
from typing import Any

import anyio
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.models.decoder.shard import Kept, ShardSpec
from adapters.models.kernels.step import Forward, Step
from adapters.sequence_layout import RowSpec
from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median, print_table
from effects.job import Job
from effects.stream import EmitTokens
from engine.serving.wiring import run_engine
from engine.settings.import_order import SWITCH_S
from states.settings import Settings

VOCABULARY = 256  # small, since an argmax is the model's work and not the engine's
MOST_REQUESTS = 64
BUCKETS = (4, 8, 16, 32, 64, 256)
COUNTED_STEPS = 64  # in which calls are counted


SPEC = ShardSpec(
    layers=range(1),
    slots=MOST_REQUESTS,
    capacity=1 << 16,
    buckets=(256,),
    vocab_size=VOCABULARY,
    device=torch.device("cpu"),
    dtype=torch.float32,
)


class NoRows:
    """Rows that are nowhere."""

    spec = RowSpec((), 1, 1, "F32")
    is_addressable = True

    def copy(self, source: int, target: int, count: int) -> None:
        assert source != target
        assert count


@frozen
class StatelessLayers:
    """A shard without recurrent layers."""

    specs: tuple[()] = ()
    block: int = 64
    checkpoint_count: int = 0


@define
class NoModel:
    """A shard that computes nothing: the same hidden states and logits for everything.

    awaited: None, or a queue into which streams put an item for each token. Then a step begins once streams have read
    the tokens of all steps that were reported to the event loop before.
    """

    spec: ShardSpec = SPEC
    awaited: SimpleQueue[None] | None = None
    rows: NoRows = field(factory=NoRows)
    states: StatelessLayers = StatelessLayers()
    _unread: deque[int] = field(factory=deque[int])  # rows of each decode step whose tokens are not waited for yet
    _hidden: Tensor = field(factory=lambda: torch.zeros(256, 8))
    _logits: Tensor = field(factory=lambda: torch.randn(MOST_REQUESTS, VOCABULARY))

    def forward(self, step: Step, inputs: Tensor) -> Forward:
        assert len(inputs) == step.rows
        if self.awaited is not None and len(step.segments) == step.rows:  # a prefill has one segment of several rows
            if len(self._unread) == 1 + self.spec.runs_ahead:
                for _ in range(self._unread.popleft()):
                    self.awaited.get()
            self._unread.append(step.rows)
        return Forward(self._hidden[: step.bucket], {})

    def commit(self, step: Step, kept: Sequence[Kept]) -> None:
        assert len(kept) == len(step.segments)

    def logits(self, step: Step, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]

    def memory(self) -> dict[str, int]:
        return {"weights": 0}

    def synchronize(self) -> None:
        """It is never behind."""

    def close(self) -> None:
        self._logits = self._hidden


@define
class CallCounter:
    """Counts the calls of functions on the thread that it is the profiler of."""

    count: int = 0

    def __call__(self, _: FrameType, event: str, __: Any) -> None:
        self.count += event in ("call", "c_call")

    def start(self) -> None:
        sys.setprofile(self)


@frozen
class DecodeCase:
    """A number of requests that decode together, as on a GPU (`overlapped`) or as on a CPU."""

    requests: int
    overlapped: bool

    @property
    def name(self) -> str:
        way = ", overlapped" if self.overlapped else ""
        return f"{self.requests} request{'s' * (self.requests > 1)}{way}"


CASES = (DecodeCase(1, False), DecodeCase(4, False), DecodeCase(1, True), DecodeCase(16, True), DecodeCase(64, True))
SHOWN = (DecodeCase(1, False), DecodeCase(64, True))  # the cases that the page of benchmarks shows


def goal_of(case: DecodeCase) -> Goal:
    return Goal(at_most=200 if case.requests <= 4 else 1000)


async def decode_steps(
    case: DecodeCase, count: int, counters: tuple[CallCounter, CallCounter] | None = None
) -> list[float]:
    """Return the microseconds between the tokens of one stream, while the requests of a case decode `count` steps.

    counters: of the event loop's thread and of the lane's, if calls are counted.
    """
    lane = DeviceLane("cpu")
    awaited = SimpleQueue[None]() if counters else None
    shard = NoModel(evolve(SPEC, runs_ahead=case.overlapped), awaited)
    executor = DeviceExecutor(ExecutorParts(shard, BUCKETS, lane=lane))
    gaps = list[float]()

    async def read(number: int) -> None:
        last = 0.0
        async for message in running.submissions.submit(Job((number + 1, 2, 3, 4), count)):
            if isinstance(message, EmitTokens):
                now = time.perf_counter()
                if last and number == 0:
                    gaps.append((now - last) * 1e6)
                last = now
                for _ in message.tokens if awaited is not None else ():
                    awaited.put(None)

    if counters is not None:
        await lane.run(counters[1].start)
        counters[0].start()
    settings = Settings(slots=MOST_REQUESTS, batch_rows=MOST_REQUESTS)
    async with run_engine(settings, executor) as running, anyio.create_task_group() as tasks:
        for number in range(case.requests):
            tasks.start_soon(read, number)
    sys.setprofile(None)
    await anyio.to_thread.run_sync(executor.close)
    return gaps


def count_calls(case: DecodeCase) -> tuple[float, float]:
    """Return the calls of functions in a step: on the event loop's thread, and on the lane's.

    Two runs are compared that differ by COUNTED_STEPS steps, so that their beginnings and ends do not count.
    """
    found = list[tuple[int, int]]()
    anyio.run(decode_steps, case, COUNTED_STEPS, (CallCounter(), CallCounter()))  # what is done once in a process
    for count in (COUNTED_STEPS, 2 * COUNTED_STEPS):
        counters = (CallCounter(), CallCounter())
        anyio.run(decode_steps, case, count, counters)
        found.append((counters[0].count, counters[1].count))
    (loop, lane), (longer_loop, longer_lane) = found
    return (longer_loop - loop) / COUNTED_STEPS, (longer_lane - lane) / COUNTED_STEPS


def measure(case: DecodeCase, count: int) -> dict[str, Any]:
    """Return the row of a case."""
    began = time.process_time()
    gaps = sorted(anyio.run(decode_steps, case, count))
    processor = (time.process_time() - began) / count * 1e6
    loop, lane = count_calls(case)
    return {
        "requests": case.name,
        "us_a_step": median(gaps),
        "p95_us": gaps[int(len(gaps) * 0.95)],
        "processor_us": processor,
        "loop_calls": loop,
        "lane_calls": lane,
        "calls_a_token": (loop + lane) / case.requests,
    }


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    given = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    rows = [measure(case, given.steps) for case in CASES]
    print_table("Engine, event loop, hand-off and sampling of a decode step, without a model", rows)
    shown = [(case, row) for case, row in zip(CASES, rows, strict=True) if case in SHOWN]
    work, calls = "a step's processor time without a model", "calls of functions for a token without a model"
    figures = [
        *(Figure("service", work, case.name, "us", row["processor_us"], goal=goal_of(case)) for case, row in shown),
        *(Figure("service", calls, case.name, "calls", row["calls_a_token"]) for case, row in shown),
    ]
    publish(given, "engine_overhead", {"rows": rows, "steps": given.steps}, figures, "cpu")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
